"""`saccade serve`: a model behind the OpenAI API."""

from argparse import Namespace
from typing import Any

from saccade import bundled
from saccade.cli.aliases import unknown_variables, variable_notes
from saccade.cli.model import chosen_model, model_parser
from saccade.cli.parser import Parser, settings_from
from saccade.client.spare import Spare
from saccade.inputs.media.media_loader import MediaSettings
from saccade.server.server_settings import ServerSettings
from saccade.terminal import warn
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

SETTINGS: tuple[type[Any], ...] = (ServerSettings, EngineSettings, SchedulerSettings, MediaSettings)


def new_parser(name: str) -> Parser:
    about = "Serve a model: a checkpoint folder or a hub id. Without MODEL, serve the one that comes with the package."
    return model_parser(name, about, *SETTINGS)


def run(flags: Namespace) -> int:
    own = {} if flags.words else bundled.SERVED
    server, engine = settings_from(flags, ServerSettings, own), settings_from(flags, EngineSettings, own)
    limits, media = settings_from(flags, SchedulerSettings, own), settings_from(flags, MediaSettings, own)
    model = chosen_model(flags.words)
    for note in (*variable_notes(), *unknown_variables(SETTINGS)):
        warn(note)
    with Spare() as spare:  # starts before the server is imported, because the worker's imports take longer
        from saccade.server.front_end import serve
        from saccade.server.lifecycle import Launch

        return serve(Launch(model, engine, limits, media, spare), server)
