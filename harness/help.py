"""The text of --help, made from the configuration folder: each choice explains itself in its first line."""

from __future__ import annotations

import textwrap

import yaml

from harness.compose import config_folder, group_choices

_HEAD = """\
cudagraph-harness: which CUDA-graph decode configuration is best for this model, this GPU and this traffic?

  python -m harness [group=choice ...] [key=value ...]      run one job
  python -m harness -m group=choice1,choice2 ...            run one job for each combination
  python -m harness VERB ...                                work on recorded jobs (VERB --help)

`cudagraph-harness` is the same program.
"""

_EXAMPLES = """\
Examples
  python -m harness
      The whole chain on this machine: capture, parity, size sweep, workload, record.
  python -m harness model=qwen3_0_6b capture=explicit capture.sizes=1,2,4,8,16 workload=trace workload.path=log.csv
      Your own capture list under your own traffic (the columns of the Azure LLM inference trace).
  python -m harness -m capture=vllm,sglang,all padding=nearest,max runner.max_batch_size=20
      Six jobs, one row each in sweep.csv.
"""

_VERBS = {
    "run": "run a job, as without a verb",
    "doctor": "what this machine can run, and what is missing, with the fix",
    "plan": "the best capture list from a recorded job",
    "simulate": "replay a trace against a recorded job, without a GPU",
    "export": "the flags of an engine for a capture list",
    "report": "one HTML page for a job or a sweep",
    "compare": "two jobs, batch size by batch size",
    "dashboard": "write a W&B workspace of a sweep or a project",
}

_FOOT = """\
Options
  --cfg job             print the composed configuration and stop; key=value changes show in it
  -m, --multirun        a comma sweeps; for a list field write k=[1,2],[1,4]
  -cd, --config-dir D   add a folder with YAML files of your own
  -sc install=bash      shell completion of cudagraph-harness: eval "$(cudagraph-harness -sc install=bash)"
  --hydra-help          the options of Hydra

Every key with its meaning: harness/schema.py.
Exit codes: 0 ok, 1 a job failed, 2 a configuration that cannot run, 130 interrupted.
"""

#: Heading → its groups, in the order in which a user decides.
_SECTIONS = (
    ("What runs", ("model", "attention", "runner")),
    ("Which graphs", ("capture", "padding", "compile")),
    ("What it is given", ("workload",)),
    ("What is measured and kept", ("measure", "tracking")),
    ("Where and how the jobs of a sweep (-m) run", ("hydra/launcher", "hydra/sweeper")),
    ("Ready-made experiments", ("experiment",)),
)


def help_text() -> str:
    """Return the whole --help."""
    sections = [_section(title, groups) for title, groups in _SECTIONS]
    return "\n".join([_HEAD, _EXAMPLES, *sections, _verbs(), _FOOT])


def _verbs() -> str:
    rows = [f"  {verb:<10} {text}" for verb, text in _VERBS.items()]
    return "\n".join(["Verbs", *rows]) + "\n"


def described_choices(group: str) -> dict[str, str]:
    """Return choice → its one-line description, the first comment of its file."""
    folder = config_folder().joinpath(group)
    texts = {choice: folder.joinpath(f"{choice}.yaml").read_text("utf-8") for choice in group_choices(group)}
    return {choice: _first_comment(text) for choice, text in texts.items()}


def _section(title: str, groups: tuple[str, ...]) -> str:
    lines = [title]
    for group in groups:
        chosen = _defaults().get(group)
        lines.append(f"  {group}=" + (f"    (default: {chosen})" if chosen else ""))
        choices = described_choices(group)
        width = max(17, *map(len, choices))
        for choice, text in choices.items():
            first, later = f"    {choice:<{width}} ", " " * (width + 5)
            lines += textwrap.wrap(text, 108, initial_indent=first, subsequent_indent=later)
    return "\n".join(lines) + "\n"


def _first_comment(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line.removeprefix("# ").strip()
    return ""


def _defaults() -> dict[str, str]:
    entries = yaml.safe_load(config_folder().joinpath("config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {
        group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()
    }
    return chosen | {"hydra/launcher": "basic", "hydra/sweeper": "basic"}  # Hydra's own defaults
