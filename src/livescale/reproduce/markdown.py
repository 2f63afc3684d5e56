"""A reproduction as Markdown: one table, the notes, what is absent, and the pictures if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.reproduce.claim import Reproduction


def as_markdown(found: Reproduction, pictures: Mapping[str, Sequence[str]] | None = None) -> str:
    """`pictures` are the names of files beside the document, by id of the claim."""
    lines: list[str] = []
    if found.verdicts:
        lines += ["| id | setup | paper | ours | tolerance | within |", "|---|---|---|---|---|---|"]
    for verdict in found.verdicts:
        claim = verdict.claim
        mark = "yes" if verdict.within else "**no**"
        cells = (claim.id, claim.setup, claim.paper, verdict.ours, claim.tolerance, mark)
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    within = sum(verdict.within for verdict in found.verdicts)
    lines += ["", f"{within} of {len(found.verdicts)} within tolerance."]
    notes = [f"- {v.claim.id}: {v.claim.note}" for v in found.verdicts if v.claim.note]
    if notes:
        lines += ["", "Notes:", "", *notes]
    if found.absent:
        lines += ["", "Not measured:", ""]
        lines += [f"- {name}: {reason}" for name, reason in found.absent.items()]
    for name, files in (pictures or {}).items():
        lines += ["", *(f"![{name}]({file})" for file in files)]
    return "\n".join(lines).strip() + "\n"
