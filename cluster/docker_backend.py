"""Scales the workers of a Compose project through the Docker SDK, as `docker compose up --scale` does, without its files.

New containers are copies of one that is there, with Compose's labels, so that `docker compose` goes on to manage them.
Removed ones get SIGTERM and their stop grace period: a worker drains before it goes.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cluster.docker_plan import (
    NUMBER_LABEL,
    ONEOFF_LABEL,
    PROJECT_LABEL,
    SERVICE_LABEL,
    ScalePlan,
    ServiceContainer,
    copied_config,
    copied_name,
    plan_scale,
)
from cluster.errors import ClusterError
from wire.control import Role

DEFAULT_STOP_S = 10  # the engine's own, where a container names none
POLL_S = 0.5


class DockerBackend:
    """One Compose project on the engine that the environment names (DOCKER_HOST; default: the local one)."""

    def __init__(self, project: str) -> None:
        """
        Raises:
            ClusterError: the SDK is not installed, or no engine answers.
        """
        try:
            self._sdk: Any = importlib.import_module("docker")
        except ModuleNotFoundError as error:
            raise ClusterError("the Docker backend needs the Docker SDK: pip install 'kvrelay[docker]'") from error
        self._project = project
        try:
            self._client = self._sdk.from_env()
            self._client.ping()
        except self._sdk.errors.DockerException as error:
            raise ClusterError(f"no Docker engine answers: {error}") from error

    def close(self) -> None:
        self._client.close()

    def scale(self, wanted: Mapping[Role, int], deadline_s: float, on_report: Callable[[str], object]) -> None:
        """Start and drain until the project runs as many workers as wanted, all of them healthy.

        Args:
            deadline_s: by then new workers must be healthy; a drain has its container's grace period.

        Raises:
            ClusterError: the engine refused, or the deadline passed.
        """
        deadline = time.monotonic() + deadline_s
        try:
            plans = {role: plan_scale(role.value, self._containers(role.value), count) for role, count in wanted.items()}
            with ThreadPoolExecutor(max_workers=16) as threads:
                jobs: list[Future[None]] = []
                for role, plan in plans.items():
                    template = self._template(role.value) if plan.create else None
                    # Copies are made before anything is removed, so that the template is still there.
                    started = [self._create(template, number, on_report) for number in plan.create if template is not None]
                    starting = (*started, *plan.start)
                    jobs += [threads.submit(self._start, container_id, deadline, on_report) for container_id in starting]
                    jobs += self._drains(threads, plan, on_report)
                for job in jobs:
                    job.result()
        except self._sdk.errors.DockerException as error:
            raise ClusterError(f"docker: {getattr(error, 'explanation', None) or error}") from error

    def counts(self) -> dict[Role, int]:
        """Running workers by role."""
        try:
            return {role: sum(one.running for one in self._containers(role.value)) for role in Role}
        except self._sdk.errors.DockerException as error:
            raise ClusterError(f"docker: {error}") from error

    def _containers(self, service: str) -> list[ServiceContainer]:
        found = self._client.api.containers(all=True, filters={"label": self._labels(service)})
        return [
            ServiceContainer(one["Id"], int(one["Labels"][NUMBER_LABEL]), one["State"] in ("running", "restarting"))
            for one in found
            if one["State"] not in ("removing", "dead")
        ]

    def _labels(self, service: str) -> list[str]:
        return [f"{PROJECT_LABEL}={self._project}", f"{SERVICE_LABEL}={service}", f"{ONEOFF_LABEL}=False"]

    def _template(self, service: str) -> dict[str, Any]:
        containers = sorted(self._containers(service), key=lambda one: (not one.running, one.number))
        inspected: dict[str, Any] = self._client.api.inspect_container(containers[0].container_id)
        return inspected

    def _create(self, template: dict[str, Any], number: int, on_report: Callable[[str], object]) -> str:
        config = copied_config(template, number, self._image(template))
        name = copied_name(template["Name"].lstrip("/"), number)
        created = self._client.api.create_container_from_config(config, name)
        on_report(f"{name}: made")
        return str(created["Id"])

    def _image(self, template: dict[str, Any]) -> str:
        """By its tag while the tag still means the same image, so that replicas are equal."""
        tag: str = template["Config"]["Image"]
        try:
            same = self._client.api.inspect_image(tag)["Id"] == template["Image"]
        except self._sdk.errors.ImageNotFound:
            same = False
        return tag if same else str(template["Image"])

    def _start(self, container_id: str, deadline: float, on_report: Callable[[str], object]) -> None:
        self._client.api.start(container_id)
        while True:
            inspected = self._client.api.inspect_container(container_id)
            name, state = inspected["Name"].lstrip("/"), inspected["State"]
            health = state.get("Health", {}).get("Status", "healthy" if state["Running"] else "starting")
            if health == "healthy":
                on_report(f"{name}: ready")
                return
            if state["Status"] in ("exited", "dead"):
                raise ClusterError(f"{name} ended with code {state['ExitCode']}; see `docker logs {name}`")
            if time.monotonic() >= deadline:
                raise ClusterError(f"{name} is {health} still; see `docker logs {name}`")
            time.sleep(POLL_S)

    def _drains(
        self, threads: ThreadPoolExecutor, plan: ScalePlan, on_report: Callable[[str], object]
    ) -> list[Future[None]]:
        jobs = [threads.submit(self._drain, container_id, True, on_report) for container_id in plan.remove]
        return jobs + [threads.submit(self._drain, container_id, False, on_report) for container_id in plan.stop]

    def _drain(self, container_id: str, remove: bool, on_report: Callable[[str], object]) -> None:
        """SIGTERM, the container's grace period, SIGKILL."""
        inspected = self._client.api.inspect_container(container_id)
        name = inspected["Name"].lstrip("/")
        if inspected["State"]["Running"]:
            on_report(f"{name}: draining")
            grace_s = inspected["Config"].get("StopTimeout") or DEFAULT_STOP_S
            self._client.api.stop(container_id, timeout=grace_s)
        if remove:
            self._client.api.remove_container(container_id, v=True)
        on_report(f"{name}: gone")


def scale_project(
    project: str, wanted: Mapping[Role, int], deadline_s: float, on_report: Callable[[str], object]
) -> dict[Role, int]:
    """What `kvrelay scale --backend docker` does; returns the numbers of running workers.

    Raises:
        ClusterError
    """
    backend = DockerBackend(project)
    try:
        backend.scale(wanted, deadline_s, on_report)
        return backend.counts()
    finally:
        backend.close()
