"""One episode: overview, dispatch, parallel crops, sub-agents, gather, answer; many episodes side by side.

    main agent     K overview frames + question -> think, then calls of crop_video or an answer
    each call      a window -> its frames -> a sub-agent (the same weights) -> a short report
    gather         all reports of the turn, in call order, one per call -> the main agent's next turn
    at the end     after `max_turns` tool turns the answer is asked for; that turn is sampled like any other

Episodes advance in rounds. A round is one engine call for the main turns of all live episodes and one for
all their sub-agents. The first round asks once per sample for `group_size` continuations, so that a group
shares its frames and its prompt. A video is opened once and read once for whatever episodes share.

What ran is recorded as it happens: nothing is read back from text. RL, evaluation and `paravt ask` run this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
import time

from paravt.conversation import Conversation
from paravt.engines.base import Engine, EngineError, Generation, Request, Sampling
from paravt.episode import AgentSetup, Episode, Look
from paravt.footage import CropKey, Footage, locate
from paravt.hashing import stable_hash
from paravt.prompting import main_prefix, main_prompt, subagent_prompt
from paravt.protocol import FORCED_ANSWER, parse_turn
from paravt.rollout import EpisodeTurn, Execution, Rollout, Sample, ToolCall, ToolError
from paravt.times import TimeError, parse_window
from paravt.video import VideoError

NO_TOOL = "unknown tool {name}; no tool is available"
NO_TURN_LEFT = "not run: no tool turn is left"
FEWER_FRAMES = "(num_frames {asked} is more than is shown at a time; here are {most} at most)"
EMPTY_REPORT = "(the report is empty)"

__all__ = ["AgentSetup", "run_episodes"]


def run_episodes(engine: Engine, samples: Sequence[Sample], setup: AgentSetup) -> list[Rollout]:
    """`group_size` finished episodes per sample, sample-major.

    Each ends as answered, no_answer, truncated or failed (with the reason in `error`). A video that cannot be
    read, or a request that the engine refuses, fails its own episodes only; an engine that cannot work at all
    raises EngineError.
    """
    started = time.perf_counter()
    with Footage(setup.visual, setup.readers) as footage:
        episodes = _open_episodes(samples, setup, footage)
        while live := [episode for episode in episodes if episode.stop is None]:
            _main_turns(engine, live, setup)
            calling = [episode for episode in live if episode.stop is None]
            _tool_turns(engine, calling, setup, footage)
            footage.close_except({episode.path for episode in calling if episode.stop is None})
    total_s = time.perf_counter() - started
    return [episode.rollout(total_s) for episode in episodes]


def _open_episodes(samples: Sequence[Sample], setup: AgentSetup, footage: Footage) -> list[Episode]:
    """Decode each overview once and build each prompt once; a group shares both."""
    budgets = [setup.budget(sample) for sample in samples]
    paths = [locate(sample.video, setup.video_root) for sample in samples]
    overviews = footage.overviews(zip(paths, budgets, strict=True))
    episodes = []
    for group, (sample, path, budget) in enumerate(zip(samples, paths, budgets, strict=True)):
        overview, seconds = overviews[path, budget]
        prompt = Conversation(setup.encoder.image_pad_id)
        if not isinstance(overview, VideoError):
            try:
                prompt = main_prompt(setup.encoder, sample, overview, setup.episode, setup.upstream)
            except VideoError as error:
                overview = error
        for index in range(setup.group_size):
            episode = Episode(sample, group, index, path, budget, prompt.copy())
            episode.seconds["decode"] = seconds
            if isinstance(overview, VideoError):
                episode.fail(overview)
            else:
                episode.frames_seen = len(overview.times_s)
            episodes.append(episode)
    return episodes


def _main_turns(engine: Engine, live: list[Episode], setup: AgentSetup) -> None:
    """Sample one turn of each live episode, all in one engine call, and read it."""
    shared: dict[tuple, list[Episode]] = defaultdict(list)
    for episode in live:
        member = episode.index if episode.turns else 0  # before the first turn a group is one request
        shared[episode.group, member].append(episode)
    groups = list(shared.values())
    requests = [
        _request(episodes[0], episodes[0].main, setup, setup.episode.max_new_tokens, n=len(episodes))
        for episodes in groups
    ]
    for episodes, answer in zip(groups, _ask(engine, requests), strict=True):
        if isinstance(answer, EngineError):
            for episode in episodes:
                episode.fail(answer)
            continue
        for episode, generation in zip(episodes, answer, strict=True):
            episode.seconds["main"] += generation.seconds
            episode.versions[generation.weight_version] = None
            _take_turn(episode, generation, setup)


def _take_turn(episode: Episode, generation: Generation, setup: AgentSetup) -> None:
    """Append what was sampled, parse the whole turn, and end the episode if nothing of it is to be run."""
    first = len(episode.main.ids)
    episode.main.append_sampled(generation.ids, generation.logprobs)
    text = main_prefix(setup.episode) + setup.encoder.decode(generation.ids)
    parsed = parse_turn(text, setup.cap, setup.dialect)
    truncated = generation.finish_reason == "length"
    turn = EpisodeTurn(
        text,
        parsed,
        forced_answer=episode.forced,
        span=(first, len(episode.main.ids)),
        finish_reason=generation.finish_reason,
    )
    runnable = parsed.valid_calls and setup.has_tool
    if parsed.calls and episode.tool_turns < setup.episode.max_turns and (runnable or not truncated):
        episode.turns.append(turn)
        return
    unrun = tuple(_unrun(call, setup) for call in parsed.calls)
    episode.turns.append(replace(turn, executions=unrun))
    episode.answer = parsed.answer
    episode.stop = "truncated" if truncated else "no_answer" if parsed.answer is None else "answered"


def _unrun(call: ToolCall | ToolError, setup: AgentSetup) -> Execution:
    """The record of a call that the end of its episode keeps from running."""
    if isinstance(call, ToolError):
        return Execution(call, call.kind, call.message)
    if not setup.has_tool:
        return Execution(call, "error", NO_TOOL.format(name=call.name))
    return Execution(call, "over_cap", NO_TURN_LEFT)


def _tool_turns(engine: Engine, calling: list[Episode], setup: AgentSetup, footage: Footage) -> None:
    """Run the calls of all episodes' last turns and hand the results back, in call order."""
    looks = [
        _prepare(episode, number, call, setup, footage)
        for episode in calling
        for number, call in enumerate(episode.turns[-1].parsed.calls)
    ]
    _read_crops([look for look in looks if look.crop], footage)
    seen = [look for look in looks if look.frames is not None and look.episode.stop is None]
    if setup.episode.dispatch == "frames":
        for look in seen:
            look.result = (look.note, look.frames)
            look.settle("ok", look.note or f"({len(look.frames.times_s)} frames)")
    else:
        _subagents(engine, seen, setup)

    by_episode: dict[int, list[Look]] = defaultdict(list)
    for look in looks:
        by_episode[id(look.episode)].append(look)
    for episode in calling:
        own = by_episode[id(episode)]
        for look in own:
            if not look.execution:  # another call of the turn failed the episode
                look.settle("error", f"not run: {episode.error}")
        executions = tuple(look.execution for look in own)
        episode.turns[-1] = replace(episode.turns[-1], executions=executions)
        if episode.stop is None:
            _hand_back(episode, [look.result for look in own], setup)


def _prepare(
    episode: Episode, number: int, call: ToolCall | ToolError, setup: AgentSetup, footage: Footage
) -> Look:
    """Decide what is to be done for one call: settle it with words, or name the window to read."""
    look = Look(episode, number, call)
    if isinstance(call, ToolError):
        look.settle(call.kind, call.message)
    elif not setup.has_tool:
        look.settle("error", NO_TOOL.format(name=call.name))
    else:
        arguments = call.arguments
        try:
            window = parse_window(
                arguments["start_time"], arguments["end_time"], footage.duration_s(episode.path)
            )
        except TimeError as error:
            look.settle("error", str(error))
        else:
            most = setup.visual.crop_max_frames
            asked = arguments.get("num_frames", most)
            look.crop = CropKey(
                episode.path, window.start_s, window.end_s, min(asked, most), arguments.get("fps", 0.0)
            )
            notes = [window.note] if window.clamped else []
            notes += [FEWER_FRAMES.format(asked=asked, most=most)] if asked > most else []
            look.note = "\n".join(notes)
    return look


def _read_crops(looks: list[Look], footage: Footage) -> None:
    """Frames for each look; a file that can no longer be read fails the episodes that look at it."""
    crops = footage.crops({look.crop for look in looks})
    slowest: dict[int, float] = {}
    for look in looks:
        frames, look.seconds = crops[look.crop]
        slowest[id(look.episode)] = max(slowest.get(id(look.episode), 0.0), look.seconds)
        if isinstance(frames, VideoError):
            look.settle("error", str(frames))
            look.episode.fail(frames)
        else:
            look.frames = frames
    for look in looks:
        look.episode.seconds["decode"] += slowest.pop(id(look.episode), 0.0)


def _subagents(engine: Engine, looks: list[Look], setup: AgentSetup) -> None:
    """One report for each look, all in one engine call. Looks at the same window share their prompt."""
    config = setup.episode
    prompts: dict[tuple, Conversation] = {}
    conversations = []
    for look in looks:
        key = (look.crop, look.episode.sample.question if config.subagent.sees_question else None)
        if key not in prompts:
            prompts[key] = subagent_prompt(
                setup.encoder, look.episode.sample, look.frames, look.crop.window_s, config
            )
        conversations.append(prompts[key].copy())
    requests = [
        _request(look.episode, conversation, setup, config.subagent.max_new_tokens, call=look.number)
        for look, conversation in zip(looks, conversations, strict=True)
    ]
    slowest: dict[int, float] = {}
    for look, conversation, answer in zip(looks, conversations, _ask(engine, requests), strict=True):
        if isinstance(answer, EngineError):
            look.settle("error", str(answer))
            look.episode.fail(answer)
            continue
        [generation] = answer
        conversation.append_sampled(generation.ids, generation.logprobs)
        look.episode.subagents.append(conversation)
        look.episode.versions[generation.weight_version] = None
        slowest[id(look.episode)] = max(slowest.get(id(look.episode), 0.0), generation.seconds)
        truncated = generation.finish_reason == "length"
        report = setup.encoder.decode(generation.ids).strip() or EMPTY_REPORT
        if truncated:
            report += f" [cut at {config.subagent.max_new_tokens} tokens]"
        report = f"{look.note}\n{report}" if look.note else report
        look.seconds += generation.seconds
        look.settle("ok", report, truncated=truncated)
    for look in looks:
        look.episode.seconds["subagents"] += slowest.pop(id(look.episode), 0.0)


def _hand_back(episode: Episode, results: list, setup: AgentSetup) -> None:
    """Append the results; after the last tool turn the same message asks for the answer."""
    episode.tool_turns += 1
    episode.forced = episode.tool_turns == setup.episode.max_turns
    setup.encoder.add_tool_results(
        episode.main,
        results,
        episode.sample.video,
        main_prefix(setup.episode),
        FORCED_ANSWER if episode.forced else "",
        setup.wrapped,
    )


def _request(
    episode: Episode,
    conversation: Conversation,
    setup: AgentSetup,
    max_new_tokens: int,
    call: int | None = None,
    n: int = 1,
) -> Request:
    """A request whose draw depends on seed, sample, episode, turn and call alone.

    In the first turn the sample index within the request stands for the episode.
    """
    turn = len(episode.turns)
    seed = stable_hash(setup.seed, episode.sample.id, episode.index if turn else 0, turn, call) >> 1
    sampling = Sampling(setup.episode.temperature, max_new_tokens, seed, n)
    return Request(tuple(conversation.ids), tuple(conversation.visuals), sampling)


def _ask(engine: Engine, requests: list[Request]) -> list[list[Generation] | EngineError]:
    """The engine's answers. A request that it refuses gets its error; the others are asked again."""
    answers: list[list[Generation] | EngineError] = [[] for _ in requests]
    waiting = list(range(len(requests)))
    while waiting:
        try:
            generations = engine.generate([requests[number] for number in waiting])
        except EngineError as error:
            if error.request is None:
                raise
            answers[waiting.pop(error.request)] = error
            continue
        for number, generation in zip(waiting, generations, strict=True):
            answers[number] = generation
        break
    return answers
