"""`saccade deploy`: deploys a model on a Ray cluster, or updates a deployment."""

import sys
from argparse import Namespace

from saccade.cli.model import model_parser
from saccade.cli.parser import Parser
from saccade.inputs.media.media_loader import MediaSettings
from saccade.ray.deploy_settings import DeploySettings
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings


def new_parser(name: str) -> Parser:
    about = (
        "Deploy a model on a running Ray cluster: front ends, and replicas of the model behind them. Returns when the "
        "model is ready. Deploying again replaces them one by one, without failing a request. --host and --port "
        "configure Ray Serve's proxies, unless they are already listening."
    )
    return model_parser(name, about, DeploySettings, ServerSettings, EngineSettings, SchedulerSettings, MediaSettings)


def run(flags: Namespace) -> int:
    from saccade.ray.deploy_plan import read_plan

    chosen = {name: getattr(flags, name) for name in flags.chosen - {"config"}}
    plan = read_plan({**chosen, "model": "".join(flags.words)}, has_proxies=True)
    from saccade.ray.application import deploy

    where = deploy(plan)
    sys.stdout.write(f"ready on {where}\n")
    return 0
