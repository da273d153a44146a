"""The first HTTP answer: an API, a web page, a login, a proxy's error, or nothing; and where the API really lies."""

from __future__ import annotations

import re
from typing import Any

import httpx

from anaphora.errors import EndpointTimeout, ProbeError
from anaphora.probes.answers import error_detail, is_html
from anaphora.probes.doctor.connection import speaks_tls
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import GET_SECONDS, Outcome, Visit
from anaphora.probes.engines import detect

_LOGIN = re.compile(r"type=[\"']?password|sign[ -]?in|log[ -]?in|single sign|oauth|\bsso\b", re.IGNORECASE)
_LOGIN_URL = re.compile(r"log-?in|sign-?in|sso|oauth|auth|saml", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_BASES = ("/v1", "/api/v1", "/openai/v1", "/engines/v1", "/api", "")
"""Where the API of known servers and gateways lies, in the order tried."""
_BY_STATUS = {
    403: "http.forbidden",
    407: "proxy.auth",
    429: "http.limit",
    502: "http.gateway",
    503: "http.unavailable",
    504: "http.gateway",
}


async def check_http(visit: Visit) -> Outcome:
    """State changes: models_answer, engine."""
    url = f"{visit.endpoint.api_base}/models"
    try:
        answer = await visit.send("GET", url)
    except ProbeError as error:
        return await _no_answer(visit, error)
    visit.models_answer = answer
    seen = f"GET {httpx.URL(url).path} answered {answer.status_code} {answer.headers.get('content-type', '')}".rstrip()
    if server := answer.headers.get("server"):
        seen += f", Server: {server}"
    finding = _judge(visit, answer, seen)
    if finding is not None:
        failed = answer.status_code in (502, 503, 504, 407)
        return Outcome(seen, (finding,), stop=True, unreachable=failed)
    visit.engine = await detect(visit.http)
    return Outcome(f"{seen}; {visit.engine.title} ({visit.engine.sure})")


async def check_path(visit: Visit) -> Outcome:
    """Finds the API where the URL as given does not lead to it. State changes: models_answer."""
    answer = visit.models_answer
    if answer is None or answer.status_code in (401, 403):
        return Outcome(f"{visit.endpoint.api_base} wants a key")
    if _is_list(answer):
        return Outcome(f"{visit.endpoint.api_base}/models is a list of models")
    for base in _other_bases(visit):
        try:
            other = await visit.send("GET", f"{base}/models")
        except ProbeError:
            continue
        if _is_list(other) or (other.status_code in (401, 403) and not is_html(other.text)):
            what = f"The API is not at {visit.endpoint.api_base}, but at {base}."
            evidence = f"{_brief(answer)} there; {_brief(other)} at {base}/models"
            return Outcome(
                evidence, (Finding("path.base", "you", what, f"Use the base URL {base}", evidence),), stop=True
            )
    try:
        post = await visit.send("POST", f"{visit.endpoint.api_base}/chat/completions", body={})
    except ProbeError:
        post = answer
    if post.status_code in (400, 401, 403, 422) and not is_html(post.text):
        return Outcome(f"no list of models ({_brief(answer)}), but /chat/completions is there")
    finding = _not_an_api(visit, answer)
    return Outcome(finding.what, (finding,), stop=True)


def is_login(answer: httpx.Response) -> bool:
    """Whether a page or a redirect asks a person to sign in."""
    if answer.is_redirect:
        return bool(_LOGIN_URL.search(answer.headers.get("location", "")))
    return is_html(answer.text) and bool(_LOGIN.search(answer.text[:20000]))


def _judge(visit: Visit, answer: httpx.Response, seen: str) -> Finding | None:
    """What is wrong with the first answer; None for what the later checks look at."""
    status, page = answer.status_code, is_html(answer.text)
    target = answer.headers.get("location", "")
    evidence = f"{seen}; {_page_title(answer) if page else error_detail(answer.text)}".rstrip("; ")
    if is_login(answer):
        return say("http.login", evidence, target=f" ({target})" if target else "")
    if answer.is_redirect:
        return say("http.redirect", evidence, target=target, right=target.removesuffix("/models"))
    if status in (400, 426) and re.search(r"plain HTTP|HTTPS port|TLS", answer.text[:2000], re.IGNORECASE):
        return say("http.https", evidence, right=visit.endpoint.api_base.replace("http:", "https:", 1))
    if status == 403 and not page:
        return None
    code = _BY_STATUS.get(status) or ("http.error" if status >= 500 else None)
    if code is None:
        return None
    return say(code, evidence, status=status, variable=visit.endpoint.proxy.variable, no_proxy=visit.no_proxy)


async def _no_answer(visit: Visit, error: ProbeError) -> Outcome:
    text, port = str(error), visit.endpoint.port
    plain = visit.endpoint.api_base.startswith("http:")
    if plain and error.kind in ("protocol", "reset") and await speaks_tls(visit):
        finding = say("http.https", text, right=visit.endpoint.api_base.replace("http:", "https:", 1))
    elif isinstance(error, EndpointTimeout):
        finding = say("http.hangs", f"no byte in {min(GET_SECONDS, visit.timeout):g} s", address=visit.where)
    elif error.kind == "proxy":
        finding = say("proxy.failed", text, problem=text, no_proxy=visit.no_proxy)
    else:
        finding = say("http.broken", error.kind, problem=text, port=port)
    return Outcome(text, (finding,), stop=True, unreachable=True)


def _other_bases(visit: Visit) -> list[str]:
    origin = str(httpx.URL(visit.endpoint.root).copy_with(raw_path=b"")).rstrip("/")
    bases = [root + tail for root in (visit.endpoint.root, origin) for tail in _BASES]
    return [base for base in dict.fromkeys(bases) if base != visit.endpoint.api_base]


def _not_an_api(visit: Visit, answer: httpx.Response) -> Finding:
    base, evidence = visit.endpoint.api_base, _brief(answer)
    if is_html(answer.text):
        return say("path.html", evidence, base=base)
    if answer.is_success:
        return say("path.not-api" if answer.text.strip() else "path.empty", evidence, base=base)
    tried = ", ".join(_other_bases(visit)[:4])
    return say("path.missing", evidence, base=base, status=answer.status_code, tried=tried)


def _is_list(answer: httpx.Response) -> bool:
    found = json_of(answer)
    return isinstance(found, list) or (
        isinstance(found, dict) and isinstance(found.get("data", found.get("models")), list)
    )


def json_of(answer: httpx.Response) -> Any:
    """The JSON of a 2xx answer; None for everything else."""
    if not answer.is_success:
        return None
    try:
        return answer.json()
    except ValueError:
        return None


def _brief(answer: httpx.Response) -> str:
    return f"{answer.status_code}{' (HTML)' if is_html(answer.text) else ''}"


def _page_title(answer: httpx.Response) -> str:
    found = _TITLE.search(answer.text[:20000])
    return f"the page says {' '.join(found.group(1).split())!r}" if found else ""
