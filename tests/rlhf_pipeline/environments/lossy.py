"""A connection that is lost."""

from __future__ import annotations

import httpx


class LosesFirstResponse(httpx.AsyncHTTPTransport):
    """Loses the first response, after it was sent."""

    dropped = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        response = await super().handle_async_request(request)
        if not self.dropped:
            self.dropped = True
            await response.aclose()
            raise httpx.ReadError("the connection was dropped")
        return response
