"""Send a POST at each interval, for as long as the settings ask for it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sentinel.errors import ConfigError
from sentinel.notify import Delivery
from sentinel.notify.http import Poster


class _Timed(Protocol):
    @property
    def interval(self) -> float: ...


Settings = TypeVar("Settings", bound=_Timed)
Request = tuple[str, bytes, dict[str, str], float]
"""URL, content, headers, and the seconds that the request may take, answer included."""


class Periodic(ABC, Generic[Settings]):
    """Sends at each interval. `serve` runs until it is cancelled; `replace` applies other settings. None: nothing is
    sent."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings
        self._changed = asyncio.Event()
        self._posters: dict[float, Poster] = {}
        """Seconds that a request may take -> client."""

    @abstractmethod
    async def send(self, settings: Settings) -> None:
        """Send what is due now. Never raises."""

    def replace(self, settings: Settings | None) -> None:
        """Use these settings from now on."""
        self.settings = settings
        self._changed.set()

    async def serve(self) -> None:
        """Send at each interval, until it is cancelled. Never raises."""
        try:
            while True:
                self._changed.clear()
                if self.settings is not None:
                    await self.send(self.settings)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.interval if self.settings else None):
                        await self._changed.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the clients; a later request creates new ones."""
        while self._posters:
            await self._posters.popitem()[1].close()

    async def post(self, make: Callable[[], Request]) -> Delivery:
        """Send once. `make` is called on a thread, and may raise ConfigError."""
        try:
            url, content, headers, timeout = await asyncio.to_thread(make)
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        except Exception as error:  # not its text: it may hold the URL
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
        try:
            poster = self._posters.setdefault(timeout, Poster(timeout))
            async with asyncio.timeout(timeout):
                return await poster.post(url, content, headers)
        except TimeoutError:
            return Delivery(fault="timeout", detail=f"no answer within {timeout:g} s", retry=True)
        except Exception as error:
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
