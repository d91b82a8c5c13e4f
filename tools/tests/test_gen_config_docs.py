"""The page of options is that of the schema."""

from __future__ import annotations

import gen_config_docs
import generated
from accel_state.config import complete_root, schema_of


def test_the_page_is_up_to_date(capsys):
    assert gen_config_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_option_has_an_entry():
    page = gen_config_docs.render()
    for bound in schema_of(complete_root()).options:
        assert f"\n`{bound.path}`{{ #{bound.path} }}\n" in page
        for name in (*bound.keys, *bound.flags, *bound.variables):
            assert f"`{name}`" in page


def test_an_old_page_is_noticed(tmp_path, monkeypatch, capsys):
    page = tmp_path / "configuration.md"
    page.write_text("of before")
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(gen_config_docs, "PAGE", page)
    assert gen_config_docs.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert gen_config_docs.main([]) == 0
    assert gen_config_docs.main(["--check"]) == 0
