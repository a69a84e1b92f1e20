"""The tables over the jobs of a folder of results, and the files they are read from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: Column of sizes.csv → its width.
COLUMNS = (
    *(("host_prepare_us_p50", 9), ("replay_ms_p50", 8), ("step_ms_p50", 8)),
    *(("back_to_back_ms", 9), ("roofline_ms", 7)),
)


def summarise(out: Path, outcomes: dict[str, str], names: Iterable[str]) -> None:
    """Write summary.json and print its tables, over every job of these names that OUT holds."""
    jobs = {name: job_summary(out / name) for name in names if (out / name / "result.json").exists()}
    before = (read_json(out / "summary.json") or {}).get("outcomes", {})
    write_json(out / "summary.json", {"date": today(), "outcomes": {**before, **outcomes}, "jobs": jobs})
    print(
        f"\n{'job':22}{'batch':>6}{'mode':>9}{'host us':>9}{'replay':>8}{'step':>8}{'in a row':>9}{'floor':>7}  ms"
    )
    for name, job in jobs.items():
        for row in job["sizes"]:
            figures = [f"{number(row[column]):>{width}}" for column, width in COLUMNS]
            print(f"{name:22}{row['batch_size']:>6}{row['mode']:>9}{''.join(figures)}")
    for name, job in jobs.items():
        print(f"{name:22}{job['line']}")


def job_summary(folder: Path) -> dict[str, Any]:
    """Return the figures of a job that the tables show."""
    result = read_json(folder / "result.json") or {}
    captures = read_csv(folder / "capture.csv")
    memory = {
        name: sum(int(row[name] or 0) for row in captures)
        for name in (captures[0] if captures else {})
        if name.endswith("_bytes")
    }
    capture, attention = result.get("capture") or {}, result.get("attention") or {}
    parity, serve = result.get("parity") or {}, read_json(folder / "bench_serve.json") or {}
    mib = ", ".join(f"{name.removesuffix('_bytes')} {value / 2**20:.0f}" for name, value in memory.items())
    served = f"; {serve['completed']} requests, TPOT p50 {serve['median_tpot_ms']:.2f} ms" if serve else ""
    overhead = (result.get("size_sweep") or {}).get("overhead")
    measuring = f"; measuring took {overhead['measuring_share']:.2%} of the sweep" if overhead else ""
    return {
        "status": result.get("status"),
        "attention": attention,
        "capture_s": capture.get("seconds"),
        "capture_bytes": memory,
        "parity": {
            name: parity.get(name) for name in ("verified", "num_cases", "num_bitwise", "max_abs_error")
        },
        "warnings": result.get("warnings"),
        "overhead": overhead,
        "sizes": read_csv(folder / "sizes.csv"),
        "line": f"{result.get('status')}: {attention.get('backend')}, {len(captures)} graphs in "
        f"{number(capture.get('seconds'))} s, MiB: {mib}; parity {parity.get('verified')}{served}{measuring}",
    }


def number(value: Any) -> str:
    return "-" if value in (None, "") else f"{float(value):.2f}"


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def today() -> str:
    return datetime.now(UTC).date().isoformat()
