"""`saccade deploy`: deploys a model on a Ray cluster, or updates a deployment."""

import sys
from argparse import Namespace

from saccade import bundled
from saccade.cli.model import model_parser
from saccade.cli.parser import Parser, settings_from
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
    from saccade.ray.deploy_plan import DeployPlan, check_names

    check_names(flags.chosen - {"host", "port", "config", "model"})
    own = {} if flags.words else bundled.SERVED
    plan = DeployPlan(
        model=flags.words[0] if flags.words else "",
        server=settings_from(flags, ServerSettings, own),
        engine=settings_from(flags, EngineSettings, own),
        limits=settings_from(flags, SchedulerSettings, own),
        media=settings_from(flags, MediaSettings, own),
        deploy=settings_from(flags, DeploySettings, own),
    )
    from saccade.ray.application import deploy

    where = deploy(plan)
    sys.stdout.write(f"ready on {where}\n")
    return 0
