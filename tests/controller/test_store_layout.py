"""A store whose tables mean something else is refused in one line, by whoever opens it."""

import sqlite3

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.report import rundata
from laminar_hpc.store.audit import records
from laminar_hpc.store.store import Store


@pytest.mark.parametrize("layout", ["1", "4"])
def test_a_store_of_another_version_is_refused(tmp_path, layout):
    """That of a version before layouts had numbers, which kept the responses themselves, and a later one."""
    Store(tmp_path).close()
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.sqlite") as database:
        if layout == "1":
            database.execute("DELETE FROM meta WHERE key = 'layout'")
        else:
            database.execute("UPDATE meta SET value = ? WHERE key = 'layout'", (layout,))
    database.close()
    text = (
        rf"store.sqlite was written by another version of laminar_hpc \(layout {layout}, not 3\); use it with"
    )
    for read_only in (False, True):
        with pytest.raises(LaminarError, match=text):
            Store(tmp_path, read_only=read_only)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(LaminarError, match=text):
        rundata.load(tmp_path)
    with records.read(tmp_path) as found:
        assert found.store is None and "layout" in found.damage
