"""Buckets through shared memory, read by another mapping of the same segments."""

import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.manifest import Manifest
from megatron_drmas.weight_sync.sender import buckets, padded_bytes
from megatron_drmas.weight_sync.shm_sender import ShmSender
from megatron_drmas.weight_sync.verify import compare, digest
from tests.tiny_models import make_llama, make_qwen2

shapes = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), min_size=1, max_size=8)


def named(shapes: list[list[int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]


def read(info: dict) -> list[tuple[str, torch.Tensor]]:
    with open(f"/dev/shm/{info['segment']}", "rb") as file:
        memory = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    found = []
    for name, dtype_name, shape, offset in zip(info["names"], info["dtype_names"], info["shapes"], info["offsets"]):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append((name, memory[offset : offset + size].view(dtype).view(shape)))
    return found


@given(shapes, st.integers(1, 2000), st.sampled_from([None, torch.bfloat16]))
def test_what_is_read_is_what_was_sent(shapes, bucket_bytes, dtype):
    tensors = named(shapes)
    sender = ShmSender(iter(tensors), bucket_bytes, dtype, verify=True)
    found = []
    try:
        while (info := sender.next_bucket()) is not None:
            found += read(info)
    finally:
        sender.close()
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (name, got), (_, sent) in zip(found, tensors):
        assert torch.equal(got, sent.to(dtype or sent.dtype)) and sender.digests[name] == digest(got)


@given(shapes, st.integers(1, 2000))
def test_buckets_are_full_but_not_too_full(shapes, bucket_bytes):
    tensors = named(shapes)
    cut = list(buckets(iter(tensors), bucket_bytes, None))
    assert [item[0] for bucket in cut for item in bucket] == [name for name, _ in tensors]
    sizes = [[padded_bytes(tensor, None) for _, tensor in bucket] for bucket in cut]
    assert all(sum(size) <= bucket_bytes or len(size) == 1 for size in sizes)
    assert all(sum(size) + after[0] > bucket_bytes for size, after in itertools.pairwise(sizes))


@given(shapes, st.integers(1, 2000))
def test_ranks_that_do_not_publish_stay_in_step(shapes, bucket_bytes):
    sender = ShmSender(iter(named(shapes)), bucket_bytes, publish=False)
    rounds = list(iter(sender.next_bucket, None))
    assert rounds == [{}] * len(list(buckets(named(shapes), bucket_bytes, None)))


def test_a_bucket_stays_until_the_second_one_after_it():
    sender = ShmSender(named([[4], [4], [4]]), 16)
    try:
        first = sender.next_bucket()
        sender.next_bucket()
        assert torch.equal(read(first)[0][1], named([[4], [4], [4]])[0][1])
        assert sender.next_bucket()["segment"] == first["segment"]
    finally:
        sender.close()


def test_close_leaves_nothing_in_shared_memory():
    sender = ShmSender(named([[4], [64, 64]]), 16)
    segments = [sender.next_bucket()["segment"], sender.next_bucket()["segment"]]
    assert all(os.path.exists(f"/dev/shm/{segment}") for segment in segments)
    sender.close()
    assert not any(os.path.exists(f"/dev/shm/{segment}") for segment in segments)


def test_a_full_shared_memory_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(WeightSyncError, match=r"100 bytes free and a bucket takes 448: .*--shm-size"):
        ShmSender(named([[100]]), 10**6).next_bucket()


def test_the_manifest_expects_the_folders_tensors_and_no_tied_head(tmp_path):
    tied = Manifest.of_folder(make_llama(str(tmp_path / "tied")), "float32")
    untied = Manifest.of_folder(make_qwen2(str(tmp_path / "untied")), "float32")
    assert "lm_head.weight" not in tied.missing() and "lm_head.weight" in untied.missing()
    assert len([name for name in untied.missing() if name.endswith("_proj.bias")]) == 6


def test_a_refused_bucket_ticks_nothing_off():
    manifest = Manifest({"a": (2,), "b": (3,)}, "float32")
    with pytest.raises(WeightSyncError, match="'b' has shape"):
        manifest.admit(["a", "b"], ["float32"] * 2, [[2], [4]])
    assert manifest.missing() == ["a", "b"] and not manifest.started
    manifest.admit(["a", "b"], ["float32"] * 2, [[2], [3]])
    assert manifest.missing() == []


def test_one_ulp_changes_a_digest_and_nothing_else_does():
    tensor = torch.randn(7, 5)
    other = tensor.clone()
    other[3, 2] = torch.nextafter(other[3, 2], torch.tensor(torch.inf))
    assert digest(tensor) == digest(tensor.t().contiguous().t()) != digest(other)
    assert digest(tensor) != digest(tensor.view(5, 7)) and digest(torch.zeros(2)) != digest(-torch.zeros(2))


def test_comparison_names_tensors_of_one_side_only():
    with pytest.raises(WeightSyncError, match="1 of 2 tensors are not in the engine: b; 1 of 2 tensors are not the actor's: c"):
        compare({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, "engine 0")
