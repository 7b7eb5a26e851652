"""Everything about a configuration that can be wrong and can be seen before a process starts."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

import megatron_drmas.environments
import megatron_drmas.weight_sync
import megatron_drmas.workflows  # noqa: F401  registers
from checkpoints_conv.errors import ConversionError
from checkpoints_conv.families import family_of
from checkpoints_conv.families.spec import ModelSpec
from checkpoints_conv.formats.hf_folder import HfFolder, read_config, read_json
from checkpoints_conv.mapping.model_mapping import ModelMapping
from megatron_drmas.actor.precision import check_precision
from megatron_drmas.algorithm.validation import check_algorithm_config
from megatron_drmas.cluster.machine import object_store_bytes
from megatron_drmas.cluster.placement import place, resolve_device
from megatron_drmas.cluster.ray_start import check_ray
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.options import typed_options
from megatron_drmas.config.schema import HealthConfig, PolicyConfig, RunConfig, ShareConfig
from megatron_drmas.config.setting import check_settings
from megatron_drmas.data.question_sets import QuestionSets, check_data, load_question_sets, overlap_warning
from megatron_drmas.environments.base import ENVIRONMENTS
from megatron_drmas.rollout.head_sizes import cpu_head_sizes
from megatron_drmas.team.parsing import PARSERS
from megatron_drmas.team.prompts import compile_prompt, prompt_variables
from megatron_drmas.team.workflow import WORKFLOWS
from megatron_drmas.validate_templates import check_templates
from megatron_drmas.weight_sync.transport import choose_transport


def validate(config: RunConfig, files: bool = True, machine: bool = True) -> list[str]:
    """Check a configuration.

    Args:
        config: a composed configuration.
        files: also check the model folders, the data and the corpus it names.
        machine: also check that this machine has what the run needs; otherwise what it lacks is a warning.

    Returns:
        What is not an error and should be said, a line each.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    check_settings(config)
    check_name(config.name)
    check_data(config.data)
    if config.rollout.top_p != 1:
        raise ConfigError(
            "rollout.top_p",
            config.rollout.top_p,
            "training computes log-probs over the whole vocabulary, not over the tokens that top_p leaves",
            "use 1 (evaluation.top_p is free)",
        )
    check_algorithm_config(config.algorithm)
    _check_health(config.health)
    _check_team(config)
    for name, policy in config.policies.items():
        check_policy(f"policies.{name}", policy, config.steps * config.algorithm.updates_per_batch)
        _check_room(name, policy, config)
    _check_environment(config, files)
    device = resolve_device(config)
    placement = place(config, device)
    for name, policy in config.policies.items():
        choose_transport(config.cluster.transport, placement.route(name, policy, device), name)
    shared = sorted(placement.gpus_of_both())
    if config.algorithm.staleness and shared:
        where = ", ".join(f"GPU {gpu} of node {node}" for node, gpu in shared[:3])
        problem = f"engines cannot go on while actors train, since they share {where}{' and others' if shared[3:] else ''}"
        remedy = "give them pools of their own (cluster.pools, policies.X.actor_pool and engine_pool), or use 0"
        raise ConfigError("algorithm.staleness", config.algorithm.staleness, problem, remedy)
    if machine:
        check_ray(config.cluster.nodes, object_store_bytes(config))
    warnings = []
    if files:
        # That the GPUs suffice was never seen here, only that they are missed.
        if device == "cuda" and torch.cuda.device_count() < config.cluster.gpus_per_node:
            lacking = ConfigError(
                "cluster.gpus_per_node",
                config.cluster.gpus_per_node,
                f"torch sees {torch.cuda.device_count()} GPUs on this machine",
                "ask Slurm for as many, or use cluster.gpus_per_node=0 cluster.device=cpu",
            )
            if machine:
                raise lacking
            warnings.append(str(lacking))
        for name, policy in config.policies.items():
            spec = check_model(f"policies.{name}", policy)
            _check_length(name, policy, spec, config)
            if device == "cpu":
                _check_head_size(name, policy, spec)
            check_precision(config.precision, device, spec.layers)
        check_templates(config)
        sets = load_question_sets(config.data)
        _check_questions(config, sets)
        overlap = overlap_warning(config.data, sets)
        warnings += [overlap] if overlap else []
        check_output(Path(config.output_dir) / config.name)
    return warnings


def check_model(prefix: str, policy: PolicyConfig) -> ModelSpec:
    """Check a policy's model folder and that its parallel layout divides the model.

    Args:
        prefix: the policy's key in the configuration, for error messages.
        policy: names the folder and the layout.

    Returns:
        The model's architecture.

    Raises:
        ConfigError: the folder is missing or incomplete, its family is unknown, or the layout does not divide it.
    """
    key = f"{prefix}.model"
    folder = Path(policy.model)
    if not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.is_dir() else "no such folder"
        raise ConfigError(key, policy.model, problem, "give a Hugging Face model folder")
    try:
        hf_config = read_config(folder)
        spec = family_of(hf_config).model_spec(hf_config)
    except ConversionError as error:
        raise ConfigError(key, policy.model, str(error), "give a model of a supported family") from error
    for part, size in (("parallel.tensor", policy.parallel.tensor), ("engine.tensor", policy.engine.tensor)):
        try:
            spec.check_layout(size)
        except ConversionError as error:
            raise ConfigError(f"{prefix}.{part}", size, str(error), "choose a size that divides them") from error
    try:
        spec.check_layout(policy.parallel.tensor, policy.parallel.pipeline)
    except ConversionError as error:
        raise ConfigError(
            f"{prefix}.parallel.pipeline", policy.parallel.pipeline, str(error), "choose a size that divides the layers"
        ) from error
    if spec.experts and policy.parallel.tensor > 1 and not policy.parallel.sequence:
        raise ConfigError(
            f"{prefix}.parallel.sequence",
            False,
            "Megatron trains expert layers under tensor parallelism with sequence parallelism only",
            f"set {prefix}.parallel.sequence=true",
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(key, policy.model, "has no .safetensors file", "convert or download the weights as safetensors")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(key, policy.model, "has no tokenizer", "copy the model's tokenizer files into the folder")
    try:
        HfFolder(folder).check(ModelMapping(spec))
        settings = {
            name: read_json(folder / name) for name in ("tokenizer.json", "tokenizer_config.json") if (folder / name).is_file()
        }
    except ConversionError as error:
        raise ConfigError(key, policy.model, str(error), "copy or convert the model again") from error
    template = settings.get("tokenizer_config.json", {}).get("chat_template")
    if not template and not (folder / "chat_template.jinja").is_file() and not (folder / "chat_template.json").is_file():
        raise ConfigError(
            key, policy.model, "its tokenizer has no chat template", "add chat_template.jinja, or use the instruct model"
        )
    return spec


def _choice(key: str, value: str, options: Any) -> None:
    if value not in options:
        raise ConfigError(key, value, "is unknown", f"choose one of: {', '.join(options)}")


def check_name(name: str) -> None:
    """A run's name, which becomes a folder's.

    Raises:
        ConfigError: it cannot.
    """
    if name in ("", ".", "..") or "/" in name or len(name.encode()) > 200:
        raise ConfigError(
            "name", name[:200], "is not the name of a folder", "use letters, digits, dots, dashes and underscores, at most 200"
        )


def check_output(folder: Path) -> None:
    """A run's folder, or the nearest one above it that is there; nothing is left behind.

    Raises:
        ConfigError: no folder can be made in it.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    try:
        tempfile.TemporaryDirectory(dir=nearest, prefix=".write_test_").cleanup()
    except OSError as error:
        raise ConfigError(
            "output_dir", str(folder.parent), f"{nearest}: {error.strerror}", "choose a folder that can be written"
        ) from error


def _check_health(config: HealthConfig) -> None:
    for kind in ("masked", "truncated", "invalid", "zero_advantage", "found_nothing"):
        share: ShareConfig = getattr(config, kind)
        if share.warn is not None and share.stop is not None and share.warn > share.stop:
            raise ConfigError(
                f"health.{kind}.warn", share.warn, f"is above the share {share.stop:g} that stops the run", "lower it"
            )


def _check_team(config: RunConfig) -> None:
    _choice("team.workflow.name", config.team.workflow.name, WORKFLOWS)
    workflow = WORKFLOWS[config.team.workflow.name]
    typed_options(
        "team.workflow.options", f"workflow {config.team.workflow.name!r}", workflow.Options, config.team.workflow.options
    )
    agents = config.team.agents
    if config.team.workflow.max_turns < workflow.min_turns:
        problem = f"leaves an agent of workflow {config.team.workflow.name!r} without a call"
        raise ConfigError(
            "team.workflow.max_turns", config.team.workflow.max_turns, problem, f"use at least {workflow.min_turns}"
        )
    if config.algorithm.reward.verdict and not workflow.verdicts:
        problem = f"no agent of workflow {config.team.workflow.name!r} accepts or rejects"
        raise ConfigError("algorithm.reward.verdict", config.algorithm.reward.verdict, problem, "set it to 0")
    if not config.policies:
        raise ConfigError("policies", None, "is empty", "define at least one policy")
    roles = {name: agent.role or name for name, agent in agents.items()}
    for role in workflow.agents:
        if role not in roles.values():
            problem = f"is missing, and workflow {config.team.workflow.name!r} calls it"
            raise ConfigError(f"team.agents.{role}", None, problem, f"define it, or give another agent role={role}")
        if list(roles.values()).count(role) > 1:
            names = [name for name in roles if roles[name] == role]
            raise ConfigError(
                f"team.agents.{names[1]}.role", role, f"is the role of {names[0]!r} too", "give each agent its own role"
            )
    for name, agent in agents.items():
        key = f"team.agents.{name}"
        role = roles[name]
        if role not in workflow.agents:
            raise ConfigError(
                key,
                None,
                f"is never called by workflow {config.team.workflow.name!r}",
                f"its roles: {', '.join(workflow.agents)}",
            )
        if agent.policy not in config.policies:
            raise ConfigError(f"{key}.policy", agent.policy, "no such policy", f"choose one of: {', '.join(config.policies)}")
        _choice(f"{key}.parser", agent.parser, PARSERS)
        needed = workflow.parsers.get(role, agent.parser)
        if agent.parser != needed:
            raise ConfigError(
                f"{key}.parser", agent.parser, f"workflow {config.team.workflow.name!r} cannot read it", f"use {needed}"
            )
        if agent.parser == "tags" and role in workflow.answering:
            problem = "gives a list, and the environment grades one answer"
            raise ConfigError(f"{key}.parser", agent.parser, problem, "use boxed, tag or text")
        if agent.tag == "think":
            raise ConfigError(f"{key}.tag", agent.tag, "marks reasoning, which no parser reads", "choose another tag")
        if agent.parser in ("tag", "tags") and not agent.tag:
            raise ConfigError(
                f"{key}.tag", agent.tag, f"parser {agent.parser!r} needs one", "name the tag that the output must hold"
            )
        words = workflow.verdicts.get(role, ())
        if not set(words) <= set(agent.choices):
            problem = f"workflow {config.team.workflow.name!r} reads the verdicts {' and '.join(map(repr, words))}"
            raise ConfigError(f"{key}.choices", list(agent.choices), problem, "list both, as they are spelled")
        if agent.choices and agent.parser in ("boxed", "tags", "text"):
            raise ConfigError(
                f"{key}.choices", list(agent.choices), f"parser {agent.parser!r} does not read them", "use parser tag"
            )
        try:
            compile_prompt(agent.prompt)
            unknown = prompt_variables(agent.prompt) - set(workflow.agents[role])
        except TemplateError as error:
            raise ConfigError(f"{key}.prompt", None, f"is not a Jinja template: {error}", "correct it") from error
        if unknown:
            given = ", ".join(workflow.agents[role])
            raise ConfigError(
                f"{key}.prompt", None, f"uses {', '.join(sorted(unknown))}, which nothing sets", f"the workflow gives it: {given}"
            )
    for name in config.policies:
        if all(agent.policy != name for agent in agents.values()):
            raise ConfigError(f"policies.{name}", None, "is not used by any agent", "map an agent to it or remove it")


def check_policy(prefix: str, policy: PolicyConfig, optimizer_steps: int) -> None:
    """Check a policy's own settings, without its model.

    Args:
        prefix: the policy's key in the configuration, for error messages.
        optimizer_steps: of the whole run.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    check_settings(policy, prefix)
    if policy.optimizer.min_lr > policy.optimizer.lr:
        raise ConfigError(
            f"{prefix}.optimizer.min_lr", policy.optimizer.min_lr, f"is above the lr {policy.optimizer.lr}", "lower it"
        )
    decay_steps = policy.optimizer.schedule_steps(optimizer_steps)
    if policy.trainable and policy.optimizer.warmup_steps >= decay_steps:
        raise ConfigError(
            f"{prefix}.optimizer.warmup_steps",
            policy.optimizer.warmup_steps,
            f"the schedule has {decay_steps} optimizer steps",
            f"use fewer, or raise steps or {prefix}.optimizer.decay_steps",
        )
    if policy.parallel.sequence and policy.parallel.tensor == 1:
        raise ConfigError(f"{prefix}.parallel.sequence", True, "needs tensor parallelism", f"set {prefix}.parallel.tensor > 1")


def _check_room(name: str, policy: PolicyConfig, config: RunConfig) -> None:
    longest = config.longest_row(name)
    key = f"policies.{name}.engine.max_model_len"
    if policy.engine.max_model_len < longest:
        raise ConfigError(
            key,
            policy.engine.max_model_len,
            f"prompt and response together may have {longest} tokens",
            "raise it, or lower rollout.max_prompt_tokens or rollout.max_response_tokens",
        )
    if policy.trainable and policy.micro_batch_tokens is not None and policy.micro_batch_tokens < longest:
        raise ConfigError(
            f"policies.{name}.micro_batch_tokens",
            policy.micro_batch_tokens,
            f"one call may have {longest} tokens",
            "raise it, or lower rollout.max_prompt_tokens or rollout.max_response_tokens",
        )


def _check_questions(config: RunConfig, sets: QuestionSets) -> None:
    environment = ENVIRONMENTS[config.environment.name]
    for key, path, questions in (
        ("data.train", config.data.train, sets.train),
        ("data.eval", config.data.eval or config.data.train, sets.evaluation),
    ):
        for question in questions:
            flaw = environment.question_flaw(question)
            if flaw:
                problem = f"question {question.id} {flaw}, which environment {config.environment.name!r} needs"
                raise ConfigError(key, path, problem, "correct the row, or leave it out")


def _check_environment(config: RunConfig, files: bool) -> None:
    environment, workflow = ENVIRONMENTS[config.environment.name], WORKFLOWS[config.team.workflow.name]
    for name in workflow.tools:
        if name not in environment.tools():
            able = [other for other, each in ENVIRONMENTS.items() if set(workflow.tools) <= each.tools().keys()]
            problem = f"has no tool {name!r}, which workflow {config.team.workflow.name!r} calls"
            remedy = f"use {' or '.join(able)}" if able else "register the tool"
            raise ConfigError("environment.name", config.environment.name, problem, remedy)
    environment.check_config(config.environment, workflow.tools, files)


def _check_head_size(name: str, policy: PolicyConfig, spec: ModelSpec) -> None:
    if spec.head_dim not in cpu_head_sizes():
        raise ConfigError(
            f"policies.{name}.model",
            policy.model,
            f"its attention heads have {spec.head_dim} dimensions, which vLLM does not compute on CPUs",
            f"use GPUs, or a model with one of: {', '.join(map(str, cpu_head_sizes()))}",
        )


def _check_length(name: str, policy: PolicyConfig, spec: ModelSpec, config: RunConfig) -> None:
    longest = max(config.longest_row(name), policy.engine.max_model_len)
    if longest > spec.max_position:
        raise ConfigError(
            "rollout.max_prompt_tokens",
            config.rollout.max_prompt_tokens,
            f"with its response a prompt may take {longest} tokens (policies.{name}.engine.max_model_len), but {policy.model} "
            f"has {spec.max_position} positions",
            "lower both",
        )
