"""Send GET requests to the Hub or a mirror, with limits on waiting time and size, since either may be hostile.

huggingface_hub's own functions read error bodies without a limit, wait as long as ``Retry-After`` demands, and print
warnings from headers. Only its client (for proxies and offline mode) and its exception classes are used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from gym_fed.version import __version__

if TYPE_CHECKING:
    import httpx2

RETRY_SECONDS = 1.0
_RETRIED = (408, 429, 500, 502, 503, 504)
_ERROR_HEADERS = ("x-error-code", "x-error-message")


def headers() -> dict[str, str]:
    """Return the headers of every request: user agent, and the token of HF_TOKEN or ``hf auth login``, if any.

    The client removes the token when a redirect leads to another host.
    """
    from huggingface_hub import constants, get_token

    # Not build_hf_headers, which requests a list of environment variables from the endpoint.
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    common = {"User-Agent": f"gym-fed/{__version__}", "Accept-Encoding": "identity"}
    return common if token is None else {**common, "Authorization": f"Bearer {token}"}


@contextmanager
def answer(url: str, *, timeout: float, start: int = 0) -> Iterator[httpx2.Response]:
    """Open a successful response, to be read with ``iter_raw``; retries one failure.

    Args:
        url: URL of the request; redirects are followed.
        timeout: Timeout of each read in seconds.
        start: Offset of the first byte to read; a response without status 206 contains all bytes.

    Raises:
        httpx2.RequestError: If there is no answer, or it is not HTTP.
        huggingface_hub.errors.HfHubHTTPError: For an error status, including subclasses; the body is not read.
    """
    import httpx2
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]  # exported lazily

    from gym_fed.base.downloads.bounds import with_bounds

    with_bounds()
    request_headers = {**headers(), **({"Range": f"bytes={start}-"} if start else {})}
    with ExitStack() as stack:
        for is_last in (False, True):
            try:
                response = stack.enter_context(
                    get_session().stream("GET", url, headers=request_headers, timeout=timeout)
                )
            except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError):
                if is_last:
                    raise
            else:
                if is_last or response.status_code not in _RETRIED:
                    break
            stack.close()
            time.sleep(RETRY_SECONDS)
        if not response.is_success:
            error_headers = {
                key: value for key in _ERROR_HEADERS if (value := response.headers.get(key)) is not None
            }
            hf_raise_for_status(
                httpx2.Response(response.status_code, headers=error_headers, request=response.request)
            )
        yield response
