"""A whole pool, with all its processes, for a test: it lives on a thread's event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

from livescale.config.pool import PoolConfig
from livescale.lab.bench.base.made_models import gauge_sum
from livescale.lab.testbed.bed import Testbed
from livescale.runtime.layout.pool_layout import PoolLayout, layout_of
from livescale.runtime.supervisor.supervisor import Pool
from made_config import made_config
from slowness import patient, patient_ms

Result = TypeVar("Result")
START_S = 120.0
STOP_S = 60.0


class LocalPool:
    """A pool with its own event loop; `with` it starts, and at the end it drains."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        model_settings: str = "",
        bed: Testbed | None = None,
        make_layout: Callable[[PoolConfig], PoolLayout] | None = None,
        is_standby: bool = False,
        **flags: object,
    ):
        """In the hosts of a testbed, if there is one, or where `make_layout` says."""
        file = scratch / "pool.yaml"
        file.write_text(f"models:\n  - path: {model}\n    name: tiny\n{model_settings}")
        self.record = scratch / "record.jsonl"
        # The defaults, for this machine: a test that is about one of them says its own.
        defaults = PoolConfig()
        patience = {
            "lost_after_ms": patient_ms(defaults.lost_after_ms),
            "stuck_after_ms": patient_ms(defaults.stuck_after_ms),
            "drain_timeout_s": round(patient(defaults.drain_timeout_s)),
            "queue_timeout_s": round(patient(defaults.queue_timeout_s or 60)),
        }
        settings = {"port": 0, "record": str(self.record), **patience}
        sizes = {"arena_bytes": "8MiB", "kv_bytes": "8MiB"}
        config = made_config(file, [], settings | sizes | flags)
        layout = None if bed is None else layout_of(bed.topology(), config, bed)
        if make_layout is not None:
            layout = make_layout(config)
        self.pool = Pool(config, layout=layout, is_standby=is_standby)
        self.url = self.pool.base_url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LocalPool:
        self._thread.start()
        try:
            self.call(self.pool.__aenter__(), START_S)
            if self.pool.config.workers:
                self.call(self.pool.ready(), START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.pool.stop(), STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patient(STOP_S))
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """`timeout_s` is that of a quiet machine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patient(timeout_s))

    def wait_ready(self) -> None:
        """Of a pool without workers of its own: those that join make it ready."""
        self.call(self.pool.ready(), START_S)

    def kill(self, child: str, number: int = signal.SIGKILL) -> None:
        """The process that is called so dies, or gets another signal."""
        os.kill(self.pool.pids()[child], number)

    def gauge(self, name: str) -> int:
        """Sum of a gauge's samples in /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=patient(10)).text
        return int(gauge_sum(text, f"livescale_{name}"))

    def serving(self) -> int:
        """Instances that have everything and serve."""
        text = httpx.get(f"{self.url}/metrics", timeout=patient(10)).text
        rows = [row for row in text.splitlines() if row.startswith("livescale_instances{")]
        return int(sum(float(r.rsplit(" ", 1)[1]) for r in rows if 'state="serving"' in r))

    def kv_in_use(self) -> float:
        """Of the pool's KV blocks the share that workers hold for running requests, whichever
        gateway these are of."""
        text = httpx.get(f"{self.url}/metrics", timeout=patient(10)).text
        assert "\nlivescale_kv_cache_usage_perc{" in text
        return gauge_sum(text, "livescale_kv_cache_usage_perc")


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Ask again and again; the wait has no other effect. `timeout_s` is that of a quiet machine."""
    deadline = threading.Event()
    timer = threading.Timer(patient(timeout_s), deadline.set)
    timer.start()
    try:
        while not is_true():
            assert not deadline.wait(0.02), f"never came true: {what}"
    finally:
        timer.cancel()
