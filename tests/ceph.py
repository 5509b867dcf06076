"""Where does a test get an S3 server that people run?

Ceph's gateway with one monitor and one storage daemon that keeps the objects in memory, unpacked from Debian's
packages by tests/ceph_packages.sh. Nothing of it is installed, all of it listens on loopback only, and all of it ends
with the process that started it, however that one ends. It starts in about a second.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.s3 import S3Server

HOW_TO_GET = "`make ceph` fetches them (66 MB of Debian packages; nothing is installed)"

START_SECONDS = 40
"""Longer than it takes on a loaded machine."""

_KEY, _SECRET = "CEPHTESTKEY", "ceph-test-secret"

# One copy of everything on one daemon. Changes of the cluster's map are decided at once, not after the second that a
# real cluster waits for more of them: it starts in one second instead of twelve. Without tcp_nodelay a GET takes 40 ms.
_CONFIG = """\
[global]
fsid = {cluster}
mon host = [v1:127.0.0.1:{mon_port}]
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
run dir = {state}
admin socket =
log file = {state}/log/$name.log
plugin dir = {library}/ceph
erasure code dir = {library}/ceph/erasure-code
osd class dir = {library}/rados-classes
keyring = {state}/keyring
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 500
mon osd report timeout = 86400
mon data avail crit = 0
mon data avail warn = 0
osd class update on start = false
osd crush update on start = false
osd client watch timeout = 3
osd objectstore = memstore
memstore device bytes = 8589934592
[mon.a]
mon data = {state}/mon
mon cluster log file = {state}/log/cluster.log
[osd.0]
osd data = {state}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway_port} tcp_nodelay=1
rgw enable usage log = false
rgw thread pool size = 32
"""


class CephUnavailableError(Exception):
    """The programs are not on this machine."""


def find_programs() -> Path:
    """The folder that holds `usr/bin/radosgw`: the unpacked one or the machine's own.

    Raises:
        CephUnavailableError: There is none; it says how to get it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    unpacked = Path(os.environ.get("CEPH_PACKAGES") or cache / "ranktape" / "ceph")
    for root in (unpacked, Path("/")):
        if (root / "usr/bin/radosgw").exists() and (root / "usr/bin/ceph-osd").exists():
            return root
    raise CephUnavailableError(f"no Ceph packages in {unpacked}: {HOW_TO_GET}")


class CephServer(S3Server):
    """A cluster of its own, whose gateway can be stopped, hung and started again with the objects kept.

    Raises:
        CephUnavailableError: The programs are not on this machine.
        RuntimeError: It does not start; the end of its log is in the message.
    """

    def __init__(self) -> None:
        self._root = find_programs()
        self._library = next((self._root / "usr/lib").glob("*-linux-gnu/ceph")).parent
        self._state = Path(tempfile.mkdtemp(prefix="ranktape-ceph-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        with ExitStack() as undo:
            undo.callback(self.stop)
            mon_port, self._gateway_port = _free_ports(2)
            self._create_cluster(mon_port)
            self._spawn("mon", "ceph-mon", "-i", "a")
            self._spawn("osd", "ceph-osd", "-i", "0")
            self.admin(
                "user", "create", "--uid=test", "--display-name=test", f"--access-key={_KEY}", f"--secret={_SECRET}"
            )
            self.start_gateway()
            super().__init__(f"http://127.0.0.1:{self._gateway_port}", key=_KEY, secret=_SECRET)
            undo.pop_all()

    def start_gateway(self) -> None:
        """Start the gateway where it listened before; returns when it answers."""
        self._spawn("gateway", "radosgw", "-n", "client.rgw")
        deadline = time.monotonic() + START_SECONDS
        while not _listens(self._gateway_port):
            if self._processes["gateway"].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not start: {self._log_end('gateway')}")
            time.sleep(0.02)

    def kill_gateway(self) -> None:
        """End the gateway at once: what it was doing stays undone, connections are refused."""
        process = self._processes.pop("gateway")
        process.kill()
        process.wait()

    def hang_gateway(self) -> None:
        """Let it accept connections and answer nothing."""
        self._processes["gateway"].send_signal(signal.SIGSTOP)

    def continue_gateway(self) -> None:
        """Let it answer again, what it was asked meanwhile as well."""
        self._processes["gateway"].send_signal(signal.SIGCONT)

    def admin(self, *words: str) -> None:
        """Run `radosgw-admin`: users, their keys and their quotas.

        Raises:
            RuntimeError: It fails; its last words are in the message.
        """
        self._run("radosgw-admin", *words)

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        shutil.rmtree(self._state, ignore_errors=True)

    def _create_cluster(self, mon_port: int) -> None:
        """Write the first maps of a cluster that knows its daemon already, so that no command has to add it."""
        state = self._state
        for name in ("mon", "osd", "log"):
            (state / name).mkdir()
        cluster = str(uuid.uuid4())
        fields = {"cluster": cluster, "mon_port": mon_port, "gateway_port": self._gateway_port}
        (state / "ceph.conf").write_text(_CONFIG.format(state=state, library=self._library, **fields))
        keyring, monmap, osdmap = (str(state / name) for name in ("keyring", "monmap", "osdmap"))
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", cluster, monmap)
        self._run("osdmaptool", "--createsimple", "1", osdmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--osdmap", osdmap, "--keyring", keyring)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", str(uuid.uuid4()), "--no-mon-config")

    def _spawn(self, name: str, program: str, *words: str) -> None:
        """Start a process that ends when this one does, whatever ends it; keys meant for a terminal do not reach it."""
        with (self._state / "log" / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", self._program(program), *words, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment(),
                start_new_session=True,
            )

    def _run(self, program: str, *words: str) -> None:
        command = [self._program(program), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=START_SECONDS, env=self._environment()
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")

    def _program(self, name: str) -> str:
        return str(self._root / "usr/bin" / name)

    def _environment(self) -> dict[str, str]:
        environment = {"CEPH_CONF": str(self._state / "ceph.conf"), "PATH": "/usr/bin:/bin", "HOME": str(self._state)}
        if self._root == Path("/"):
            return environment
        libraries = (
            self._library,
            self._library / "ceph",
            self._root / "lib" / self._library.name,
            self._root / "usr/lib",
        )
        return environment | {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}

    def _log_end(self, name: str) -> str:
        return (self._state / "log" / f"{name}.out").read_text()[-2000:]


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to clients.

    A client that keeps trying a port of that range while its server is down ends up connected to itself. Each worker of
    pytest-xdist draws from a range of its own: a port is not taken yet when its number is given to the server.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20000 + worker % 12 * 1000
    ports: list[int] = []
    with ExitStack() as open_sockets:
        while len(ports) < count:
            one = open_sockets.enter_context(socket.socket())
            with suppress(OSError):
                port = random.SystemRandom().randrange(first, first + 1000)
                one.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
