"""The pages of options are those of the schema."""

from __future__ import annotations

import gen_config_docs
import generated
from accel_state.config import complete_root, schema_of


def test_the_pages_are_up_to_date(capsys):
    assert gen_config_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_option_has_an_entry():
    page = "".join(gen_config_docs.render().values())
    for bound in schema_of(complete_root()).options:
        assert page.count(f"\n`{bound.path}`{{ #{bound.path} }}\n") == 1
        for name in (*bound.keys, *bound.flags, *bound.variables):
            assert f"`{name}`" in page


def test_an_old_page_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    monkeypatch.setattr(gen_config_docs, "FOLDER", tmp_path)
    assert gen_config_docs.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert gen_config_docs.main([]) == 0
    assert gen_config_docs.main(["--check"]) == 0
