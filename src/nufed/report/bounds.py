"""The tables and charts of ``nufed bounds``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nufed.report.tables import Table
from nufed.theory import GREEK

TERMS = {
    "initial_gap": "initial gap",
    "bias": "bias μ_F",
    "drift_dissimilarity": "drift, dissimilarity γ_F",
    "drift_noise": "drift, noise σ_F",
    "agent_sampling": "sampling of agents",
    "gradient_noise": "gradient noise",
}


def bounds_tables(bounds: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Constants, bounds per ν, predicted against measured, and the theorem's terms."""
    tables = [("Constants", _constants(bounds))]
    if bounds["by_steps"]:
        tables.append(("Bounds by number of steps", _by_steps(bounds)))
    measured = [row for row in bounds["methods"] if "measured" in row]
    if measured:
        tables.append(("Predicted and measured, final model", _predicted(measured)))
    promised = [row for row in bounds["methods"] if "terms" in row]
    if promised:
        tables.append(("Theorem 1, bound on the mean of E‖∇F(w_k)‖²", _theorem(promised)))
    return tables


def bounds_notes(bounds: Mapping[str, Any]) -> list[str]:
    """What to keep in mind when reading the tables."""
    notes = []
    if bounds["stationarity"]:
        notes.append(
            "The constants are lower estimates of suprema, measured at a few models: B and γ_G at "
            "every method's start and end, L, σ_G and κ_G at the start and one end, ρ, σ_H, κ_H "
            "and γ_H at one end. Bounds made of them are indications, not guarantees. F* is taken "
            "as 0. Measured values are root mean squares over agents."
        )
    if not bounds["smooth"]:
        notes.append(
            "The loss has kinks (ReLU, max-pooling or the like): its gradient is not smooth and "
            "its Hessian not Lipschitz, so there is no ρ and the paper's bounds do not apply. Use "
            'a smooth activation (model.args.activation = "tanh") to have them.'
        )
    if not bounds["uniform"]:
        notes.append("Theorem 1 is about the uniform mean; this run combines updates otherwise.")
    trivial = [
        row["method"] for row in bounds["methods"] if row.get("total", 0) > row.get("trivial", 0)
    ]
    if trivial:
        notes.append(
            f"For {', '.join(trivial)} the bound is above (B·c^ν)², which ‖∇F‖² never exceeds: "
            "over so few rounds the theorem promises nothing."
        )
    over = [row for row in bounds["methods"] if not row.get("admissible", True)]
    if over:
        names = ", ".join(f"{r['method']} ({r['meta_lr']:.2g})" for r in over)
        notes.append(
            f"meta_lr (β) is above what Theorem 1 allows, 1/(10τL_F), for {names}: there it says "
            "nothing, and its terms are shown for the largest β that is allowed."
        )
    return notes


def _constants(bounds: Mapping[str, Any]) -> Table:
    rows = []
    for name, estimate in bounds["constants"].items():
        if estimate is None:
            rows.append([f"{name} ({GREEK[name]})", "none", "–", "–"])
        else:
            counted = str(estimate["samples"] or "given")
            rows.append(
                [
                    f"{name} ({GREEK[name]})",
                    f"{estimate['value']:.3g}",
                    f"{estimate['spread']:.2g}",
                    counted,
                ]
            )
    return Table(["", "value", "spread", "measurements"], rows, [False] * len(rows))


def _by_steps(bounds: Mapping[str, Any]) -> Table:
    headings = [
        "ν",
        "L_F",
        "largest β",
        "γ_F",
        "μ FO",
        "μ HF",
        "μ exact",
        "σ FO",
        "σ HF",
        "σ exact",
    ]
    rows = []
    for row in bounds["by_steps"]:
        errors = row["errors"]
        kinds = ("first_order", "hessian_free", "exact")
        numbers = [row["smoothness"], row["largest_meta_lr"], row["dissimilarity"]]
        numbers += [errors[kind][which] for which in ("bias", "error") for kind in kinds]
        rows.append([str(row["steps"]), *(f"{n:.3g}" for n in numbers)])
    return Table(headings, rows, [False] * len(rows))


def _predicted(methods: list[Mapping[str, Any]]) -> Table:
    headings = ["", "ν", "μ_F ≤", "bias", "σ_F ≤", "error", "γ_F ≤", "dissimilarity"]
    rows = []
    for row in methods:
        cells = [row["method"], str(row["steps"])]
        for key in ("bias", "error", "dissimilarity"):
            cells.append(f"{row[key]:.3g}" if key in row else "–")
            cells.append(f"{row['measured'][key]:.3g}")
        rows.append(cells)
    return Table(headings, rows, [False] * len(rows))


def _theorem(methods: list[Mapping[str, Any]]) -> Table:
    rows = [
        ["β of the run", *(f"{m['meta_lr']:.2g}" for m in methods)],
        [
            "largest β allowed",
            *(f"{m['largest_meta_lr']:.2g}" for m in methods),
        ],
        *([words, *(f"{m['terms'][term]:.3g}" for m in methods)] for term, words in TERMS.items()),
        ["total", *(f"{m['total']:.3g}" for m in methods)],
    ]
    return Table(["", *(m["method"] for m in methods)], rows, [False] * len(rows))
