"""Write the tables of docs/models.md anew: ``python benchmarks/models_table.py``."""

from __future__ import annotations

from pathlib import Path

from iclperm.models import markdown, table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- iclperm models: begin -->\n", "<!-- iclperm models: end -->"


def main() -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{markdown(table())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
