from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from cluster.errors import ClusterError, ClusterNotFound
from cluster.run_directory import ClusterRecord, base_directory, find_cluster, run_directory, running_clusters, write_record


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def record(port: int, directory: Path) -> ClusterRecord:
    return ClusterRecord(port=port, pid=os.getpid(), url=f"http://127.0.0.1:{port}", control=str(directory / "c"))


def test_clusters_are_found_by_port_and_gone_behind_their_block(environ: dict[str, str], tmp_path: Path) -> None:
    with run_directory(8000, environ) as first:
        assert running_clusters(environ) == []  # it has not said yet where it listens
        write_record(first, record(8000, first))
        # 1. The only one is found without its port.
        assert find_cluster(None, environ) == record(8000, first)
        with run_directory(8100, environ) as second:
            write_record(second, record(8100, second))
            # 2. Of two, one must be named.
            with pytest.raises(ClusterNotFound, match="8000, 8100"):
                find_cluster(None, environ)
            assert find_cluster(8100, environ) == record(8100, second)
            with pytest.raises(ClusterNotFound, match="8200"):
                find_cluster(8200, environ)
            # 3. A port is one cluster's.
            with pytest.raises(ClusterError, match="8100"), run_directory(8100, environ):
                pass
        assert find_cluster(None, environ).port == 8000
        assert (first.stat().st_mode & 0o777, first.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_cluster_left_is_removed(environ: dict[str, str], tmp_path: Path) -> None:
    base = base_directory(environ)

    def leave() -> None:
        (base / "8000").mkdir(parents=True)
        (base / "8000" / "notify.sock").touch()
        (base / "8000.lock").touch()

    # 1. By whoever looks.
    leave()
    assert running_clusters(environ) == []
    assert list(tmp_path.iterdir()) == []
    # 2. By the next one on that port.
    base.mkdir(mode=0o700)
    leave()
    with run_directory(8000, environ) as directory:
        assert list(directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_protects_the_directory(environ: dict[str, str]) -> None:
    base = base_directory(environ)
    (base / "8000").mkdir()
    with (base / "8000.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert running_clusters(environ) == []
        assert (base / "8000").is_dir()


def test_a_directory_that_others_may_enter_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "kvrelay").mkdir(mode=0o755)
    (tmp_path / "kvrelay").chmod(0o755)
    with pytest.raises(ClusterError, match="nobody else"):
        base_directory(environ)


def test_a_link_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kvrelay").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError):
        base_directory(environ)


def test_a_path_too_long_for_sockets_is_refused_early(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ClusterError, match="XDG_RUNTIME_DIR"):
        base_directory({"XDG_RUNTIME_DIR": str(deep)})


def test_without_a_runtime_directory_there_is_one_per_user(tmp_path: Path) -> None:
    assert base_directory({"TMPDIR": str(tmp_path)}) == tmp_path / f"kvrelay-{os.getuid()}"
