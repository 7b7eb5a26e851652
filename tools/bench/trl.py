"""Seconds of a GRPO step of a small model, against TRL's GRPOTrainer on the same questions.

    python -m tools.bench.trl --models FOLDER --questions FILE [--cache FOLDER] [--steps 3]

FOLDER holds SmolLM2-135M-Instruct (`tools/smollm2.py`), FILE questions with number answers such as GSM8K's.  TRL gets an
environment of its own in the cache folder, made by the first call, with this environment's torch and transformers.  Both
train the model in fp32 with as many threads as there are cores, on the same questions in the same order, with the same groups,
lengths, temperature and learning rate, and recompute nothing; TRL generates with transformers, since it has vLLM on GPUs only.
Half of TRL's steps are taken before this project's run, and half after it; while the other one runs, it waits.
Medians; the last line is JSON, and `ratio` is TRL's seconds over this project's.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, cast

from megatron_drmas.cluster.machine import usable_cores
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from tools.ablation.command import count
from tools.bench.command import BenchParser
from tools.bench.training_runs import ROOT, steps_of, train

TARGET = 2.5
TRL = "trl==1.16.0"
MODEL = "SmolLM2-135M-Instruct"
QUESTIONS, SAMPLES, RESPONSE = 8, 4, 64  # of a step, of a question, and the tokens of a response


def ensure_environment(folder: Path) -> Path:
    """Make TRL's environment, unless the folder holds it.

    Returns:
        Its Python.

    Raises:
        SystemExit: pip failed; names its log.
    """
    wanted = [TRL, *(f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers"))]
    python, stamp, log = folder / "bin" / "python", folder / "installed.txt", folder / "pip.log"
    if not stamp.exists() or stamp.read_text().split() != wanted:
        print(f"installing {TRL} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        with open(log, "w") as output:
            command = [str(python), "-m", "pip", "install", "--no-input", *wanted]
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode:
                sys.exit(f"trl: pip could not install {' '.join(wanted)}; see {log}")
        stamp.write_text("\n".join(wanted))
    return python


def drawn_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Prompt and answer of every question that the run of `config` draws, in its order."""
    import megatron_drmas.workflows  # noqa: F401  registers
    from megatron_drmas.data.question_sets import load_question_sets
    from megatron_drmas.data.sampler import QuestionSampler
    from megatron_drmas.team.team import Team

    (agent,) = Team.from_config(config.team).agents.values()
    questions = load_question_sets(config.data).train
    drawn = QuestionSampler(len(questions), config.seed, config.data.shuffle).draw(config.steps * config.questions_per_step)
    return [(agent.messages(question=questions[n].text)[0]["content"], questions[n].answers[0]) for n in drawn]


class TrlTrainer:
    """The process of `trl_trainer.py`.

    Args:
        python: of TRL's environment.
        settings: for the trainer.
        log: file for what it prints.
    """

    def __init__(self, python: Path, settings: dict[str, Any], log: Path):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("trl_trainer.py")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._log = log
        self.ask(json.dumps(settings))

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line; the answer to it.

        Raises:
            SystemExit: the trainer ended; says its last words.
        """
        asked, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        asked.write(line + "\n")
        asked.flush()
        answer = answers.readline()
        if not answer:
            sys.exit(f"trl: TRL's trainer ended: {(self._log.read_text().splitlines() or [''])[-1]}")
        return json.loads(answer)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """The command line."""
    parser = BenchParser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help=f"folder with {MODEL}")
    parser.add_argument("--questions", type=Path, required=True, help=".jsonl or .parquet, with number answers")
    parser.add_argument(
        "--cache", type=Path, default=Path("outputs/bench"), help="for TRL's environment, 1.5 GB (default: %(default)s)"
    )
    parser.add_argument("--steps", type=count(3), default=3, help="of each trainer (default: %(default)s)")
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        choices=(4, 8, 16, 32),
        default=8,
        help="completions of TRL's passes (default: %(default)s)",
    )
    args = parser.parse_args()
    if not (args.models / MODEL / "config.json").is_file():
        parser.error(f"--models {args.models}: has no {MODEL}; make it: python tools/smollm2.py --out {args.models / MODEL}")
    settings = ["~policies.verifier", f"variables.models={args.models.resolve()}", f"steps={args.steps}"]
    settings += [f"variables.questions={args.questions.resolve()}", f"questions_per_step={QUESTIONS}", f"group_size={SAMPLES}"]
    settings += ["team=math_single", f"rollout.max_response_tokens={RESPONSE}", "rollout.temperature=1.0"]
    settings += ["evaluation.before=false", "evaluation.after=false", "checkpoint.export=false"]
    try:
        config = compose_config("math", settings)
        rows = drawn_rows(config)
    except ConfigError as error:
        parser.error(str(error))
    asked = {
        "model": str((args.models / MODEL).resolve()),
        "rows": rows,
        "questions": QUESTIONS,
        "samples": SAMPLES,
        "response": RESPONSE,
        "steps": args.steps,
        "micro_batch": args.trl_micro_batch,
        "threads": usable_cores(),
    }
    python = ensure_environment(args.cache.resolve() / "trl")
    with tempfile.TemporaryDirectory() as folder:
        trainer = TrlTrainer(python, asked, Path(folder, "trl.log"))
        try:
            theirs = [trainer.ask() for _ in range(args.steps // 2)]
            ours = steps_of(train(ROOT, Path(folder, "ours"), ["--config-name", "math", *settings]))
            theirs += [trainer.ask() for _ in range(args.steps - args.steps // 2)]
        finally:
            trainer.end()
    seconds = {"TRL": [step["seconds"] for step in theirs], "this project": [sum(step["seconds"].values()) for step in ours]}
    tokens = {"TRL": [step["tokens"] for step in theirs], "this project": [step["tokens_generated"] for step in ours]}
    for name, values in seconds.items():
        print(f"{name:13}{'  '.join(f'{value:.1f}' for value in values)} s a step; {sum(tokens[name])} tokens generated")
    parts = {phase: statistics.median(step["seconds"].get(phase, 0.0) for step in ours) for phase in ours[0]["seconds"]}
    print("of this project's: " + ", ".join(f"{phase} {value:.2f} s" for phase, value in parts.items()))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["TRL"] / medians["this project"]
    print(json.dumps({"name": "trl", "ratio": round(ratio, 2), "target": TARGET, "ok": ratio >= TARGET, "trl": TRL}))
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    main()
