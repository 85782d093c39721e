"""Formulas of docstrings, which are plain Unicode, as LaTeX for the site."""

import re
import unicodedata

ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}
FUNCTIONS = {"min", "max", "exp", "log", "softmax", "clip", "sign", "cos", "diag", "KL"}
SYMBOLS = {
    "−": "-",
    "·": r"\cdot ",
    "⊙": r"\odot ",
    "‖": r"\|",
    "Σ": r"\sum ",
    "∇": r"\nabla ",
    "∂": r"\partial ",
    "←": r"\leftarrow ",
    "…": r"\ldots ",
    "𝔯": r"\mathfrak{r}",
    "½": r"\tfrac12 ",
    "∞": r"\infty ",
}
RAISED = dict(zip("⁰¹²³⁴⁺⁻ᵀᵏ", ("0", "1", "2", "3", "4", "+", "-", r"\top", "k"), strict=True))
LOWERED = dict(zip("₀₁₂₃", "0123", strict=True))
WORDS = r"(?:(?:(?!d[A-Z])[A-Z]*[a-z][A-Za-z-]+|[A-Z][A-Za-z]+)(?:'s|'|’)?|a(?= [a-z]{2}))"
TOKEN = re.compile(
    rf"(?P<words>{WORDS}(?:,? {WORDS})*)|(?P<raised>[{''.join(RAISED)}]+)"
    rf"|(?P<lowered>[{''.join(LOWERED)}]+)|(?P<other>.)",
    re.DOTALL,
)
SUBSCRIPT = re.compile(r"([_^])([^\W_]{2,}'?)|([_^])([^\W_][\u0302-\u0304]?'?)")
MOST = 62  # characters of a line before the next piece starts another


def with_formulas(text: str) -> str:
    """Markdown whose indented formulas are fences of math; other indented blocks stay."""
    blocks = re.split(r"\n\n", text)
    return "\n\n".join(fenced(block) if is_formula(block) else block for block in blocks)


def is_formula(block: str) -> bool:
    indented = all(line.startswith("    ") for line in block.splitlines() if line)
    return indented and bool(re.search(r"[=←∝·]", block))


def fenced(block: str) -> str:
    return f"```math\n{latex(block)}\n```"


def latex(block: str) -> str:
    """A formula of one or several lines; what is aligned in the block is aligned."""
    lines = [unicodedata.normalize("NFD", line[4:]) for line in block.rstrip().splitlines()]
    lines = [re.sub(r" {2,}←", " ←", line) for line in lines]
    cells = [[(m.start(), m[0]) for m in re.finditer(r"\S+(?: \S+)*", line)] for line in lines]
    starts = [start for row in cells for start, _ in row]
    first = min(starts)
    labels = [text for row in cells for start, text in row if start == first and len(row) > 1]
    second = [s for s in sorted(set(starts)) if s > first and starts.count(s) > 1][:1]
    columns = [first, *(second if labels and all(text.endswith(":") for text in labels) else [])]
    rows = []
    for row in cells:
        texts, length = [""] * len(columns), 0
        for start, text in row:
            place = max(i for i, column in enumerate(columns) if column <= start)
            if texts[place] and length + len(text) > MOST:
                rows.append(texts)
                texts, length = [""] * len(columns), 0
            texts[place] += (r" \qquad " if texts[place] else "") + inline(text)
            length += len(text)
        rows.append(texts)
    body = " \\\\\n".join(" & ".join(texts).rstrip("& ") for texts in rows)
    return f"\\begin{{array}}{{{'l' * len(columns)}}}\n{body}\n\\end{{array}}"


def inline(text: str) -> str:
    """One formula as LaTeX.

    >>> inline("θ ← mean of θ̃_im − η∇f_i(w_{l+1})²".replace("θ̃", "θ\u0303"))
    'θ \\\\leftarrow  \\\\text{ mean of } \\\\tilde{θ}_{im} - η\\\\nabla f_{i}(w_{l+1})^{2}'
    """
    text = re.sub(r"√(?:\(([^()]*)\)|(\w))", lambda m: f"\0{{{m[1] or m[2]}}}", text)
    text = re.sub(r"\b([a-z]{3,})_([a-z]{2,})\b", lambda m: f"\4{m[1]}\5{m[2]}\6", text)
    text = re.sub(r"argmin(_(\w))?", lambda m: f"\1_{m[2]}" if m[2] else "\1", text)
    text = SUBSCRIPT.sub(subscript, text)
    text = re.sub("(.)([" + "".join(ACCENTS) + "])", accented, text)
    text = "".join(token(match) for match in TOKEN.finditer(text))
    text = text.replace("\0", r"\sqrt").replace("\1", r"\operatorname*{arg\,min}")
    text = re.sub(r"\x04(.*?)\x05(.*?)\x06", key, text)
    return re.sub(r"\x02(\w+)\x03", r"\\mathrm{\1}", text)


def key(match: re.Match[str]) -> str:
    """A setting by its name."""
    plain = [re.sub(r"\\text\{(.*)\}", r"\1", part) for part in match.groups()]
    return rf"\texttt{{{plain[0]}\_{plain[1]}}}"


def subscript(match: re.Match[str]) -> str:
    mark, name = match[1] or match[3], match[2] or match[4]
    if len(name.rstrip("'")) > 2 and name.isascii():
        return f"{mark}{{\2{name}\3}}"
    if len(name) > 1 and not re.fullmatch(r"[\wα-ωℓ][a-z0-9]'?", name):
        return f"{mark}{{{name[0]}}}{name[1:]}"
    return f"{mark}{{{name}}}"


def accented(match: re.Match[str]) -> str:
    return f"\\{ACCENTS[match[2]]}{{{match[1]}}}"


def token(match: re.Match[str]) -> str:
    text = match[0]
    if match["words"]:
        return words(match)
    if match["raised"]:
        return "^{" + "".join(RAISED[c] for c in text) + "}"
    if match["lowered"]:
        return "_{" + "".join(LOWERED[c] for c in text) + "}"
    return SYMBOLS.get(text, text)


def words(match: re.Match[str]) -> str:
    """Words as text, with the spaces around them; names of functions upright."""
    text, before, after = match[0], match.string[: match.start()], match.string[match.end() :]
    if re.search(r"[\\{\2]$", before) and re.match(r"[}{\3]", after):
        return text  # a command, its argument, or a subscript
    if text in FUNCTIONS:
        return (
            rf"\{text} "
            if text in ("min", "max", "exp", "log", "cos")
            else rf"\operatorname{{{text}}}"
        )
    left, right = " " * before.endswith(" "), " " * after.startswith(" ")
    return rf"\text{{{left}{text}{right}}}"
