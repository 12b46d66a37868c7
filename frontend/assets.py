"""The console's static files, served by the process itself without a detour through threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware

__all__ = ["StaticFiles"]


class StaticFiles(WhiteNoiseMiddleware):
    """WhiteNoise for an async chain: as a sync-only middleware it would push every request through a thread."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any], *args: Any) -> None:
        super().__init__(get_response, *args)
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def add_files(self, root: str, prefix: str | None = None) -> None:
        """The collected files are optional: in one-machine mode the finders know the rest."""
        if Path(root).is_dir():
            super().add_files(root, prefix)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if not self.is_async:
            return cast(HttpResponseBase, super().__call__(request))
        return self._serve_or_pass(request)

    async def _serve_or_pass(self, request: HttpRequest) -> HttpResponseBase:
        file = self.candidates(request)
        if file is None:
            return cast(HttpResponseBase, await self.get_response(request))
        response = self.serve(file, request)
        if response.streaming:
            response.streaming_content = _chunks(response.streaming_content)
        return cast(HttpResponseBase, response)

    def candidates(self, request: HttpRequest) -> Any:
        """The file of that address, if it is one."""
        path = request.path_info
        return self.find_file(path) if self.autorefresh else self.files.get(path)


async def _chunks(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    # Small files from the page cache: reading one blocks for less time than handing it to a thread would.
    for part in parts:
        yield part
