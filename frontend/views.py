"""Pages of the console. Each shows what its viewer may see and nothing else."""

from __future__ import annotations

from functools import partial
from typing import cast

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from frontend.feed import live_feed
from frontend.selectors import Page, find_request, parse_request_id, recent_requests
from frontend.stream import board_of, events
from frontend.viewer import release_connections, scope_of, still_signed_in
from tenants.models import User

__all__ = ["live", "requests", "stream"]

FIRST_SNAPSHOT_S = 1.5
"""A process just started waits this long for its first snapshot before it says that there is none."""


@require_safe
@login_required
async def live(request: HttpRequest) -> HttpResponse:
    """The live page with the state as it is now, complete without JavaScript."""
    user = cast(User, await request.auser())
    scope = await sync_to_async(scope_of)(user)
    feed = live_feed()
    await feed.newer_than(0, FIRST_SNAPSHOT_S)
    context = {"page": "live", "board": board_of(feed, scope)}
    return await sync_to_async(render)(request, "console/live.html", context)


@require_safe
async def stream(request: HttpRequest) -> HttpResponseBase:
    """The push. 401 (not a redirect) without a session: the page's script then reloads the page."""
    user = await request.auser()
    if not isinstance(user, User) or not user.is_active:
        return HttpResponse("Not signed in.\n", status=401, content_type="text/plain")
    scope = await sync_to_async(scope_of)(user)
    await sync_to_async(release_connections)()
    body = events(live_feed(), scope, sync_to_async(partial(still_signed_in, request)))
    response = StreamingHttpResponse(body, content_type="text/event-stream")
    response.headers["Cache-Control"] = "no-store, no-transform"
    response.headers["X-Accel-Buffering"] = "no"
    return response


@require_safe
@login_required
def requests(request: HttpRequest) -> HttpResponse:
    """The newest requests of the last hour, or the one whose id was asked for. 404 for a cursor we never made."""
    scope = scope_of(cast(User, request.user))
    wanted = request.GET.get("id", "").strip()[:200]
    if wanted:
        known = parse_request_id(wanted)
        line = find_request(scope, known) if known else None
        page = Page((line,) if line else (), None)
    else:
        before = request.GET.get("before", "")
        cursor = parse_request_id(before)
        if before and cursor is None:
            raise Http404
        page = recent_requests(scope, cursor)
    context = {"page": "requests", "rows": page, "wanted": wanted, "paged": "before" in request.GET}
    return render(request, "console/requests.html", context)
