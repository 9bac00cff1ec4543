"""A POST at each interval, for as long as the settings ask for it."""

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
"""URL, content, headers, and the seconds that it may take, answer included."""


class Periodic(ABC, Generic[Settings]):
    """`serve` runs until it is cancelled; `replace` at other settings. None: nothing is sent."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings
        self._changed = asyncio.Event()
        self._poster: Poster | None = None

    @abstractmethod
    async def send(self, settings: Settings) -> float:
        """What is due now. Seconds that the other side is to be left alone for at least. Never raises."""

    def replace(self, settings: Settings | None) -> None:
        """From now on."""
        self.settings = settings
        self._changed.set()

    async def serve(self) -> None:
        """Until it is cancelled. Never raises."""
        try:
            while True:
                self._changed.clear()
                wait = None
                if (settings := self.settings) is not None:
                    wait = max(await self.send(settings), settings.interval)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the client."""
        if self._poster is not None:
            await self._poster.close()
            self._poster = None

    async def post(self, make: Callable[[], Request]) -> Delivery:
        """Send once. `make` is called on a thread, and may raise ConfigError."""
        try:
            url, content, headers, timeout = await asyncio.to_thread(make)
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        except Exception as error:  # not its text: it may hold the URL
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
        try:
            if self._poster is None:
                self._poster = Poster(timeout)
            async with asyncio.timeout(timeout):
                return await self._poster.post(url, content, headers)
        except TimeoutError:
            return Delivery(fault="timeout", detail=f"no answer within {timeout:g} s", retry=True)
        except Exception as error:
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
