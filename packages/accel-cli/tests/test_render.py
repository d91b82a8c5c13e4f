"""Facts as plain lines, and on a terminal."""

from accel_cli.render import show_facts, show_table, show_text


def test_long_values_are_folded_on_a_terminal_only(capsys, monkeypatch):
    facts = {"system": {"platform": "Linux-[bold]-" + "x" * 100, "cores": 2}}
    show_facts(facts)
    assert capsys.readouterr().out.splitlines()[1] == "  platform  Linux-[bold]-" + "x" * 100
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")  # no colours, and 80 columns
    show_facts(facts)
    title, *value, last = capsys.readouterr().out.splitlines()
    assert (title, last.split()) == ("system:", ["cores", "2"])
    assert len(value) > 1
    assert max(map(len, value)) <= 80
    assert [line[:12] for line in value] == ["  platform  ", *[" " * 12] * (len(value) - 1)]
    assert "".join(line[12:].strip() for line in value) == facts["system"]["platform"]


def test_sentences_are_folded_between_words_on_a_terminal_only(capsys, monkeypatch):
    text = "Why: " + "it needs no other package " * 6 + "and " + "x" * 50 + "\nlast"
    show_text(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    show_text(text)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "last"
    assert max(len(line) for line in lines if "x" not in line) <= 40
    assert " ".join(lines) == text.removesuffix("\nlast")


def test_a_narrow_terminal_goes_without_spare_columns(capsys, monkeypatch):
    columns, rows = ("strategy", "peak", "weights", "logits"), [("fsdp2", "1.5", "1.0", "0.5")]
    spare = ("logits", "weights")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "25")
    assert show_table(columns, rows, spare=spare) == []  # no terminal
    assert capsys.readouterr().out.split() == [*columns, *rows[0]]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for width, without in ((40, []), (25, ["logits"]), (16, ["logits", "weights"])):
        monkeypatch.setenv("COLUMNS", str(width))
        assert show_table(columns, rows, spare=spare) == without
        header, row = capsys.readouterr().out.splitlines()
        assert max(len(header), len(row)) <= width
        assert header.split() == [name for name in columns if name not in without]


def test_the_last_column_is_folded_and_not_cut(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    show_table(("difference", "name"), [("float32 [64], by up to 0.1", "model.layers.0.weight")], left=2)
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert "".join(line.replace("float32 [64], by up to 0.1", "").strip() for line in lines) == (
        "model.layers.0.weight"
    )
