"""The prediction route of Vertex AI, whose requests contain several requests of other endpoints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from ngramspec.errors import NGramSpecError
from ngramspec.server.call import Call
from ngramspec.server.endpoint import Endpoint
from ngramspec.server.errors import ApiError, error_body, to_api_error
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.status import health

MAX_INSTANCES = 128
"""Maximum number of requests in one, as in llama-server."""

_FORMAT = "@requestFormat"


@dataclass(frozen=True, slots=True)
class VertexRoutes:
    """Paths and port that Vertex AI requires of a server, from the variables that it sets in a container."""

    predict: str  # path of the prediction route
    health: str | None  # additional path of `/health`; `None` means no additional one
    port: int  # port of the server

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> VertexRoutes | None:
        """Return the routes; `None` outside of Vertex AI's containers for predictions."""
        if variables.get("AIP_MODE") != "PREDICTION":
            return None
        port = variables.get("AIP_HTTP_PORT") or "8080"
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise NGramSpecError(f"AIP_HTTP_PORT must be a port number, got {port!r}")
        health = variables.get("AIP_HEALTH_ROUTE")
        predict = variables.get("AIP_PREDICT_ROUTE") or "predict"
        return cls(_add_slash(predict), _add_slash(health) if health else None, int(port))

    def endpoints(self, other_endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Return the endpoints; instances may name `other_endpoints` by a path or its camel case: chatCompletions."""
        paths = {path for endpoint in other_endpoints for path in endpoint.paths}
        if self.predict in paths:
            raise NGramSpecError(f"AIP_PREDICT_ROUTE must not be the path of another endpoint, got {self.predict}")
        endpoints = [Endpoint((self.predict,), _Predictions(other_endpoints))]
        if self.health is not None and self.health not in paths:
            endpoints.append(Endpoint((self.health,), health, "GET", public=True))
        return endpoints


class _Predictions:
    """Handler of the prediction route."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        targets = [
            (path, target)
            for target in endpoints
            for path in target.paths
            if target.method == "POST" and "{" not in path
        ]
        formats = {_to_camel_case(path): endpoint for path, endpoint in reversed(targets)}
        self._endpoints = formats | dict(targets)

    async def __call__(self, call: Call) -> Response:
        """Answer all instances. The answer of an invalid instance is its error; none is a stream.

        As many run at once as there are slots, so that requests of other clients come between them.
        """
        call.fields.require("instances")
        instances = list(call.fields.objects("instances"))
        call.fields.check_count("instances", len(instances), MAX_INSTANCES, "items")
        limit = asyncio.Semaphore(len(call.model.service.report().slots))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._predict(call, instance, limit)) for instance in instances]
        return await asyncio.to_thread(JsonResponse, {"predictions": [task.result() for task in tasks]})

    async def _predict(self, call: Call, instance: Fields, limit: asyncio.Semaphore) -> Any:
        format_error: Callable[[ApiError], dict[str, Any]] = error_body
        try:
            name = instance.require_string(_FORMAT)
            endpoint = self._endpoints.get(name)
            if endpoint is None:
                raise instance.field_error(_FORMAT, f"unknown format {name[:80]!r}; use one such as chatCompletions")
            fields = {**instance.data, "stream": False}
            format_error = endpoint.format_error
            async with limit:
                response = await endpoint.handler(replace(call, fields=Fields(fields)))
        except (ApiError, NGramSpecError) as error:
            return format_error(to_api_error(error))
        assert isinstance(response, JsonResponse)
        return response.encoded


def _to_camel_case(path: str) -> str:
    words = re.split("[/_-]", path.removeprefix("/v1").removeprefix("/"))
    return words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])


def _add_slash(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"
