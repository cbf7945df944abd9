"""The recipe for a transport: one file, one entry point, and the launcher that chooses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train

FILES = '''
    """Transport ``files``: slots and weights in files of a folder, messages over a socket pair."""

    import os
    import shutil
    import socket
    import tempfile
    from functools import partial
    from pathlib import Path

    from tianflow.channels.arena import Arena, arena_nbytes
    from tianflow.channels.link import Link, socket_pair
    from tianflow.channels.shm import SharedMemory, SharedWeights
    from tianflow.interfaces import Connection
    from tianflow.launchers.processes import ProcessLauncher
    from tianflow.planning.memory import slots_capacity

    FOLDERS = []


    def arena_in(path, layout, capacity):
        with path.open("r+b") as file:
            memory = SharedMemory(os.dup(file.fileno()), path.stat().st_size)
        return memory, Arena(layout=layout, buffer=memory.buffer, capacity=capacity)


    class FileTransport:
        """The coordinator's side."""

        def __init__(self, layout, capacity):
            self._folder = Path(tempfile.mkdtemp(prefix="files-transport-"))
            FOLDERS.append(self._folder)
            slots = self._folder / "slots"
            with slots.open("wb") as file:
                file.truncate(arena_nbytes(layout, capacity))
            self._memory, self.arena = arena_in(slots, layout, capacity)
            self.draws = None
            self.address = f"files://{self._folder}"

        def add_slots(self, count):
            """The file system allocates pages when they are written."""

        def connect(self):
            ours, theirs = socket_pair()
            return Connection(partial(Link, end=ours), (theirs.fileno(),), theirs.close)

        def close(self):
            shutil.rmtree(self._folder, ignore_errors=True)


    class FileHostTransport:
        """A host's side."""

        draws = None

        def __init__(self, folder, layout, end):
            slots = folder / "slots"
            capacity = slots.stat().st_size // arena_nbytes(layout, 1)
            self._memory, self.arena = arena_in(slots, layout, capacity)
            self._folder, self.open_link = folder, partial(Link, end=end)

        @classmethod
        def attach(cls, address, descriptors, *, layout, draws):
            folder = Path(address.partition("://")[2])
            return cls(folder, layout, socket.socket(fileno=descriptors[0]))

        def open_weights(self, nbytes):
            path = self._folder / "weights"
            size = SharedWeights.nbytes_for(nbytes)
            with path.open("ab") as file:
                file.truncate(size)
            with path.open("r+b") as file:
                memory = SharedMemory(os.dup(file.fileno()), size)
            return SharedWeights(memory=memory, nbytes=nbytes)


    class FileLauncher(ProcessLauncher):
        """The shipped launcher with this transport."""

        @staticmethod
        def slots(*, config, layout, draws):
            return FileTransport(layout, slots_capacity(config, layout))
'''


@pytest.mark.e2e
def test_a_launcher_with_a_transport_of_its_own_trains(
    user_package: UserPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_package.write("files", FILES)
    user_package.entry_point("tianflow.transports", "files", "files:FileHostTransport")
    user_package.entry_point("tianflow.launchers", "files", "files:FileLauncher")
    monkeypatch.setenv("PYTHONPATH", str(user_package.folder), prepend=":")
    placement = {"launcher": "files", "affinity": "none"}
    finished = train(tmp_path, actors={"hosts": 2, "count": 2}, placement=placement)
    assert UPDATES == finished.summary["updates"]
    assert 0 == finished.summary["staleness"]["violations"]
    (folder,) = user_package.load("files").FOLDERS
    assert not folder.exists()
