"""Log-probs of a checkpoint in fp32, by transformers or by Megatron, for comparing checkpoints."""

import math
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.dist_reader import is_dist_checkpoint
from checkpoints_conv.formats.hf_folder import read_config

SHORT, LONG = 64, 4096 + 256  # tokens
POSITIONS = 256  # whose log-probs are compared
MAX_WORK = 2 * 10**11  # parameters x tokens: half a minute on a few CPU cores
SCORE_BYTES = 16  # of one attention score: eager attention holds it four times in fp32


def logprobs(folder: Path, config_folder: Path, tokens: Tensor, positions: Tensor) -> Tensor:
    """Log-probs over the vocabulary after some of the tokens, float32 [ways, n, vocab].

    Runs in a process of its own: Megatron's state and the patches of `cpu.install()` are global to a process.

    Args:
        folder: a Hugging Face folder or a Megatron distributed checkpoint.
        config_folder: folder with its config.json.
        tokens: int64 [t].
        positions: int64 [n], of the tokens.

    Returns:
        One result for each way of computing the same: transformers' eager and sdpa attention; one by Megatron.
    """
    run = _megatron_logprobs if is_dist_checkpoint(folder) else _hf_logprobs
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return torch.from_numpy(pool.apply(run, (folder, config_folder, tokens.tolist(), positions.tolist())))


def affordable_tokens(spec: ModelSpec, parameters: int) -> int:
    """Length of a forward pass: enough to see an attention window of 4096, unless that takes long or too much memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - 4 * parameters
    in_memory = math.isqrt(max(free // 2, 0) // (SCORE_BYTES * spec.heads))
    return max(min(LONG, spec.max_position, in_memory, MAX_WORK // parameters), min(SHORT, spec.max_position))


def sample_positions(count: int) -> Tensor:
    """At most `POSITIONS` of so many tokens, the first and the last among them; int64 [n]."""
    return torch.linspace(0, count - 1, min(count, POSITIONS)).round().long()


def sample_tokens(vocab: int, count: int) -> Tensor:
    """The same pseudo-random token ids on every call, int64 [count]."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(0))


def model_logprobs(model: Any, spec: ModelSpec, tokens: Tensor, positions: "Tensor | slice" = slice(None)) -> Tensor:
    """Log-probs of a GPTModel that is whole on this pipeline stage, after the tokens at `positions`, float32 [n, vocab]."""
    count, device = len(tokens), next(model.parameters()).device
    mask = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)[None, None]  # True: hidden
    # Logits of all positions would take more memory than all the rest.
    hook = model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][positions], *inputs[1:]))
    with torch.no_grad():
        logits = model.eval()(tokens[None].to(device), torch.arange(count, device=device)[None], mask)
    hook.remove()
    return logits[0, :, : spec.vocab].float().log_softmax(-1).cpu()


def load_dist_checkpoint(chunks: list, folder: Path) -> None:
    """A Megatron distributed checkpoint's parameters into this rank's chunks, by Megatron's own loader; collective."""
    from megatron.core import dist_checkpointing

    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    state = dist_checkpointing.load(state, str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{number}"])


def _hf_logprobs(folder: Path, config_folder: Path, tokens: list[int], positions: list[int]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ways = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            ways.append(model(torch.tensor([tokens]), logits_to_keep=torch.tensor(positions)).logits[0].log_softmax(-1))
    return torch.stack(ways).numpy()


def _megatron_logprobs(folder: Path, config_folder: Path, tokens: list[int], positions: list[int]) -> Any:
    warnings.simplefilter("ignore")  # of what Megatron falls back to without a GPU
    from megatron.core import parallel_state, tensor_parallel

    from checkpoints_conv.megatron import cpu
    from checkpoints_conv.megatron.model import build_model, transformer_config

    cpu.install()
    spec = family_of(config := read_config(config_folder)).model_spec(config)
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{os.path.join(rendezvous, 'store')}", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        chunks = build_model(spec, transformer_config(spec, perform_initialization=False), parallel_output=False)
        load_dist_checkpoint(chunks, folder)
        result = model_logprobs(chunks[0], spec, torch.tensor(tokens), torch.tensor(positions))[None].numpy()
        torch.distributed.destroy_process_group()
    return result
