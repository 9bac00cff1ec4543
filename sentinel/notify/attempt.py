"""Make one attempt at a delivery, whatever the receiver's code does: it may be another package's.

Of an exception only its class is reported: its text may hold the URL.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from sentinel.notify import DELIVERED, Delivery, Message, Route

log = logging.getLogger(__name__)

FAULTS = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions from a plugin's code. CancelledError: what it waited for may be cancelled, without this task."""
CLOSE_SECONDS = 1.0
"""Most seconds that a receiver may take to release what it holds open."""


async def attempt(route: Route, message: Message) -> Delivery:
    """Deliver once, within the receiver's time. Raises nothing but CancelledError, where this task is cancelled."""
    try:
        async with asyncio.timeout(route.timeout):
            delivery: object = await route.receiver.deliver(message)
    except TimeoutError:
        return Delivery(fault="timeout", detail=f"no answer within {route.timeout:g} s", retry=True)
    except FAULTS as error:
        if _is_cancelled():
            raise
        return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
    if isinstance(delivery, Delivery):
        return delivery if _is_sound(delivery) else _unsound(route, delivery)
    kind = type(delivery).__name__  # it may have been delivered: repeating it for a day would be worse than an error
    return Delivery(fault="internal", detail=f"its code answers {kind} and no Delivery")


def _is_sound(delivery: Delivery) -> bool:
    """Whether its fields have their types, which nothing checks before: an `after` from a header may be text."""
    try:
        return msgspec.convert(msgspec.to_builtins(delivery), Delivery).after >= 0.0
    except (msgspec.MsgspecError, TypeError):
        return False


def _unsound(route: Route, delivery: Delivery) -> Delivery:
    """Return a sound Delivery instead of one that the pipeline cannot use, nor another daemon read from the outbox."""
    log.error("receiver %s: its code returned a Delivery with a field of the wrong type", route.name)
    if delivery.fault is None:
        return DELIVERED
    return Delivery(fault="internal", detail="its code returned something other than a Delivery", retry=True)


async def close(route: Route) -> None:
    """Have a receiver release what it holds open, within `CLOSE_SECONDS`. Raises as `attempt` does."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await route.receiver.close()
    except FAULTS as error:
        if _is_cancelled():
            raise
        log.error("receiver %s: %s when it was closed", route.name, type(error).__name__)


def _is_cancelled() -> bool:
    """Whether the present task is cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
