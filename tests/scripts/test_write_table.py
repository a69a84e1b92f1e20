from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from runners.models.fused.tuning import TABLES, WinnerTable

ROOT = Path(__file__).parents[2]
TABLE = TABLES / "nvidia_h200_sm90.json"
MEASURED = ROOT / "docs" / "results" / "h200" / "fused_attention.json"


def test_the_shipped_table_is_what_the_command_writes_of_the_shipped_measurement(tmp_path: Path) -> None:
    path = tmp_path / TABLE.name
    shutil.copy(TABLE, path)
    command = [sys.executable, "scripts/bench_fused.py", str(MEASURED), "--write-table", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert path.read_text() == TABLE.read_text()


def test_a_shipped_tile_is_near_the_best_of_every_context_measured() -> None:
    table = WinnerTable.read(TABLE)
    for cell in json.loads(MEASURED.read_text())["attention_cells"].values():
        entry = table.attention_entry(16 if cell["model"] == "0.6b" else 32, 8, 128, cell["batch_size"])
        assert entry is not None and entry["measured_rows"] == cell["batch_size"]
        best, took = min(cell["attention_us"].values()), entry["us_by_context"][str(cell["context_len"])]
        assert took <= best * (1.03 if cell["context_len"] == 512 else 1.3), cell["context_len"]
