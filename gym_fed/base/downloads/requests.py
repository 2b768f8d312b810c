"""Send one GET to the Hub or a mirror, either of which may be hostile: waits and sizes are bounded.

huggingface_hub's own functions read an error's body whole, wait as long as ``Retry-After`` demands, and print what a
header warns of. Its client is used for its proxies and offline mode, and its exceptions for their names.
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
    """Headers of every request: the program, and the token of HF_TOKEN or ``hf auth login`` if there is one.

    The client takes the token away where a redirect leads to another host.
    """
    from huggingface_hub import constants, get_token

    # Not build_hf_headers: it requests from the endpoint which environment variables to read.
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    common = {"User-Agent": f"gym-fed/{__version__}", "Accept-Encoding": "identity"}
    return common if token is None else {**common, "Authorization": f"Bearer {token}"}


@contextmanager
def answer(url: str, *, timeout: float, start: int = 0) -> Iterator[httpx2.Response]:
    """Open a successful response, whose body is read with ``iter_raw``; one failure is retried.

    Args:
        url: The address; redirects are followed.
        timeout: Seconds for each read.
        start: The first byte to read; an answer without status 206 has all bytes.

    Raises:
        httpx2.RequestError: When nothing answers, or something else than HTTP.
        huggingface_hub.errors.HfHubHTTPError: For a refusal, and its subclasses; its body is not read.
    """
    import httpx2
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]  # exported lazily

    from gym_fed.base.downloads.bounds import with_bounds

    with_bounds()
    sent = {**headers(), **({"Range": f"bytes={start}-"} if start else {})}
    with ExitStack() as stack:
        for is_last in (False, True):
            try:
                response = stack.enter_context(
                    get_session().stream("GET", url, headers=sent, timeout=timeout)
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
