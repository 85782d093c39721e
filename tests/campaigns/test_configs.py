"""Random settings are accepted, or refused in one sentence that names the key or the file."""

import random
import string
import tomllib

import pytest
import tomli_w

from nufed.errors import InputError, shown
from nufed.lab.config import load_config, presets
from nufed.lab.config.load import known_keys

ODD = ["", " ", "a b", "a\nb", "'", '"', "é", "ν", "\x00", "\udcff", "[x]", "int", "=", "#"]
NUMBERS = [0, 1, -1, 2, 10**9, 10**30, -(10**400), 10**5000, 0.0, 0.5, -0.1, 1e308, 1e-320]
NUMBERS += [float("inf"), float("nan")]
WORDS = ["auto", "exact", "mean", "digits", "fcnn", "gmeta", "test", "no.such:thing", "x" * 100_000]
FRAGMENTS = ["[[[[", "{", "[1,", "= =", "[data]\n[data]", "x = 1\nx = 2", "'''", "\\u12", "1_", "["]
FRAGMENTS += ["[" * 5000, "x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000, "\ufeff", "\x00"]


def word(rng):
    """A string that may be a key or a value."""
    usual = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
    return rng.choice([usual, usual, usual + rng.choice(ODD), usual + "." + usual])


def value(rng, depth=0):
    if depth < 3 and rng.random() < 0.25:
        inner = [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        return inner if rng.random() < 0.5 else {word(rng): v for v in inner}
    return rng.choice([rng.choice(NUMBERS), rng.choice(WORDS), rng.choice(ODD), True, False, None])


def key(rng):
    """Of the schema, nearly of it, below it, of a method, or any."""
    known = rng.choice(known_keys())
    typo = known[: rng.randrange(1, len(known) + 1)] + rng.choice(["", "z", "_x"])
    below = f"{known}.{word(rng)}"
    method = f"methods.{word(rng)}.{rng.choice(known_keys()).split('.')[-1]}"
    return rng.choice([known, known, known, typo, below, method, word(rng)])


def nested(dotted, content):
    for part in reversed(dotted.split(".")):
        content = {part: content}
    return content


def keys_of(tables):
    """All keys of tables, including nested ones."""
    for name, content in tables.items():
        yield str(name)
        if isinstance(content, dict):
            yield from keys_of(content)


def check(source, overrides, names):
    """Load settings; return whether they are accepted. An error names one of ``names``."""
    try:
        load_config(source, overrides)
    except InputError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 3000, said
        assert any(name in said or shown(name)[1:-1] in said for name in names), (said, names)
        return False
    return True


def as_mapping(rng, path):
    tables = nested(key(rng), value(rng))
    if rng.random() < 0.1:
        tables[rng.choice([1, 2.5, None, ("a",)])] = value(rng)
    return tables, [], list(keys_of(tables))


def as_override(rng, path):
    text = rng.choice([shown(value(rng)), rng.choice(FRAGMENTS), word(rng), str(rng.random())])
    override = rng.choice(["{}={}", "{}={}", "{}={}", "{} = {}", "{}{}", "={}{}"]).format(
        key(rng) + ".x" * rng.choice([0, 0, 0, 0, 5000]), text
    )
    names = [override, *override.partition("=")[0].strip().split(".")]
    return rng.choice(sorted(presets())), [override], [name for name in names if name]


def as_file(rng, path):
    """A file: valid TOML with random content, fragments of TOML, or random bytes."""
    tables, _, names = as_mapping(rng, path)
    try:
        text = tomli_w.dumps(tables) + rng.choice(["", "", *FRAGMENTS])
        tomllib.loads(text)
    except Exception:  # can't be encoded or decoded
        text = "\n".join(rng.choices([*FRAGMENTS, "rounds = 3", "[method]"], k=3))
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        content = bytearray(content + b"\n" + rng.randbytes(20))
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        names = list(keys_of(_tables(content)))
    path.write_bytes(content)
    return path, [], [*names, str(path)]


def _tables(content):
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError):
        return {}


def as_name(rng, path):
    name = rng.choice([word(rng), "x" * 100_000, "a/" * 3000, *ODD, str(path.parent)])
    return name, [], [name, "neither a preset"]


WAYS = [as_mapping, as_mapping, as_override, as_override, as_file, as_name]


@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_settings_are_accepted_or_refused_in_one_sentence(tmp_path, tell, times):
    rng, taken = random.Random(times), 0
    for number in range(times):
        way = WAYS[number % len(WAYS)]
        taken += check(*way(rng, tmp_path / "odd.toml"))
    tell(
        f"settings: {times:,} random mappings, overrides, files and names: {taken} accepted, "
        f"{times - taken} refused with a message that names the key, override or file"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["quickstart", "rounds=" + "9" * 5000],
        ["quickstart", "data.agents=1000000000000000000000"],
        ["quickstart", "method.batch_size=100000000000000000000000000000"],
        ["quickstart", "method.adapt_lr=1" + "0" * 400],
        ["quickstart", "seeds=[-1]"],
        ["quickstart", "model.args.hidden=[1e99]"],
        ["quickstart", "=3"],
        ["quickstart", "a" + ".b" * 5000 + "=1"],
        ["\udcff.toml"],
        ["x" * 5000],
    ],
    ids=lambda arguments: arguments[-1][:20].encode("ascii", "replace").decode(),
)
def test_the_command_line_refuses_in_one_sentence(tmp_path, nufed, arguments):
    result = nufed("run", *arguments, "--out", tmp_path / "run", cwd=tmp_path)
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("nufed: error: ") and len(line) < 3000
