"""A policy's own tokenizer and chat template: the one place where messages become ids, and ids text.

Rollouts, evaluation and supervised fine-tuning use it, so they agree on a prompt's ids and on what ends a turn.
"""

import difflib
import inspect
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerFast

from megatron_drmas.rollout.control_tokens import ControlTokens, MaskedText

EOS_FILES = ("generation_config.json", "config.json")
OWN_VARIABLES = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}  # no options
EXPRESSION_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)  # of a Jinja template
LOOKS_LIKE_CONTROL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>")


class ChatError(ValueError):
    """A tokenizer, a chat template or an option of it that cannot be used.

    Args:
        problem: what is wrong, without its subject.
        remedy: what to do.
        option: the name in `template_options`; None: the model folder is at fault.
    """

    def __init__(self, problem: str, remedy: str, option: str | None = None):
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy, self.option = problem, remedy, option


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder.

    A tokenizer.json is taken as it is.  `AutoTokenizer` would rebuild parts of it by the model's architecture, and a Qwen2
    model with a tokenizer of its own would see other ids than it was trained on.

    Raises:
        ChatError: transformers cannot load it, or has no `tokenizers` version of it.
    """
    if (Path(model) / "tokenizer.json").is_file():
        loader: Any = PreTrainedTokenizerFast
    else:
        from transformers import AutoTokenizer  # imports every model's configuration

        loader = AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing more exact
        raise ChatError(f"its tokenizer cannot be loaded ({_line(error)})", "copy the tokenizer files again") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ChatError(f"its tokenizer is a {type(tokenizer).__name__}", "convert it to a tokenizer.json")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


class ChatTokenizer:
    """Messages → prompt ids, sampled ids → text.

    What messages say stays text, whatever control tokens it spells; see `ControlTokens`.  An assistant's earlier turns may
    hold the marks that a model writes itself (`<think>`, `<tool_call>`), and a template may treat them.

    Args:
        model: Hugging Face folder.
        template_options: further variables of the chat template, such as `enable_thinking`.

    Attributes:
        stop_ids: the ids that end a response: each `eos_token_id` of generation_config.json and config.json, the
            tokenizer's, and `end_of_turn`; sorted.
        end_of_turn: the id with which the chat template ends an assistant's turn, and failing that the tokenizer's
            end-of-sequence token.
        notices: what works but deserves a look, a line each.

    Raises:
        ChatError: what cannot work.
    """

    def __init__(self, model: str, template_options: dict[str, Any]):
        self._model = model
        self._tokenizer = load_tokenizer(model)
        self._options = template_options
        self._vocab_size: int | None = _read(model, "config.json").get("vocab_size")
        self.notices: list[str] = []
        self._checked_roles: set[tuple[str, ...]] = set()
        largest, name = max((id, token) for token, id in self._tokenizer.get_vocab().items())
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise ChatError(
                f"its tokenizer has token {largest} ({name}), its config.json a vocab_size of {self._vocab_size}",
                "use the tokenizer that the model was trained with, or enlarge the model's embedding",
            )
        self._check_options()
        sources = {file: _eos_ids(model, file) for file in EOS_FILES}
        if self._tokenizer.eos_token_id is not None:
            sources["the tokenizer"] = [self._tokenizer.eos_token_id]
        self._control = ControlTokens(self._tokenizer, list(chain.from_iterable(sources.values())))
        self._look_closer()
        template_end = self._template_end()
        if template_end is not None:
            sources["the chat template"] = [template_end]
        self.stop_ids = self._stop_ids(sources)
        self._control = ControlTokens(self._tokenizer, self.stop_ids)
        self.end_of_turn: int = (sources.get("the chat template") or sources.get("the tokenizer") or self.stop_ids)[0]

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat rendered once, with the generation prompt.

        Raises:
            ChatError: the template refuses the messages.
        """
        return self.encode_prompts([self.render_prompt(messages)])[0]

    def render_prompt(self, messages: list[dict[str, str]]) -> MaskedText:
        """The text of `prompt_ids`, which `encode_prompts` makes of it.

        Raises:
            ChatError: the template refuses the messages.
        """
        masked, mask = self._control.mask(messages)
        return MaskedText(self._render(masked, add_generation_prompt=True), mask)

    def encode_prompts(self, prompts: Sequence[MaskedText]) -> list[list[int]]:
        """The ids of rendered prompts; while they are computed, other threads of Python run."""
        return self._control.encode_all(prompts)

    def dialogue_ids(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """A chat that ends with the assistant's turn, as the prompt's ids and those of the response.

        The prompt's are what `prompt_ids` gives for the messages before; the response's end with `end_of_turn`.

        Raises:
            ChatError: the template refuses the messages, or renders the prompt differently once it is answered.
        """
        masked, mask = self._control.mask(messages)
        prompt, whole = self._render(masked[:-1], add_generation_prompt=True), self._render(masked)
        if not whole.startswith(prompt):
            problem = "the chat template renders the prompt differently before the answer"
            raise ChatError(problem, "use a template that only appends")
        prompt_ids, ids = self._control.encode(prompt, mask), self._control.encode(whole, mask)
        response = ids[len(prompt_ids) :]
        if ids[: len(prompt_ids)] != prompt_ids:  # a token across the border, which could not be sampled
            response = self._control.encode(whole[len(prompt) :], mask)
        if self.end_of_turn in response:
            response = response[: response.index(self.end_of_turn)]
        return prompt_ids, [*response, self.end_of_turn]

    def prompt_text(self, prompt_ids: list[int]) -> str:
        """A prompt as the model sees it, the template's marks included."""
        return self._tokenizer.backend_tokenizer.decode(prompt_ids, skip_special_tokens=False)

    def text(self, token_ids: list[int]) -> str:
        """The response as text, without the token that ended it; other control tokens are spelled out, and an id that has no
        token is U+FFFD."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        parts: list[list[int]] = [ids]
        if not self._tokens.issuperset(ids):
            parts = [[]]
            for id in ids:
                if id in self._tokens:
                    parts[-1].append(id)
                else:
                    parts.append([])
        return "\ufffd".join(self._tokenizer.backend_tokenizer.decode(part, skip_special_tokens=False) for part in parts)

    def spelled(self, message: dict[str, str]) -> list[str]:
        """The control tokens that a message spells, and that therefore stay text."""
        return self._control.spelled(message)

    def check_prompt(self, messages: list[dict[str, str]]) -> int:
        """Whether a prompt says what its messages say, in ids that the model knows.

        Returns:
            Its number of tokens.

        Raises:
            ChatError: it does not, or the template refuses the messages.
        """
        self.check_roles(tuple(message["role"] for message in messages))
        prompt = self.render_prompt(messages)
        (ids,) = self.encode_prompts([prompt])
        if self._vocab_size is not None and max(ids, default=0) >= self._vocab_size:
            problem = f"a prompt has token {max(ids)}, its config.json a vocab_size of {self._vocab_size}"
            raise ChatError(problem, "use the model's own tokenizer")
        unknown = self._tokenizer.unk_token
        if unknown and ids.count(self._tokenizer.unk_token_id) > prompt.text.count(unknown):
            problem = f"its tokenizer does not know every character of the prompt, and gives {unknown} for one"
            raise ChatError(problem, "leave it out of the prompt")
        return len(ids)

    def check_roles(self, roles: tuple[str, ...]) -> None:
        """Whether a chat of messages of these roles can be rendered with all that they say.

        Raises:
            ChatError: the template refuses or ignores a role.
        """
        if roles in self._checked_roles:
            return
        messages = probe(roles)
        rendered = self._render(messages, add_generation_prompt=roles[-1] != "assistant")
        for message in messages:
            if message["content"] not in rendered:
                role = message["role"]
                raise ChatError(
                    f"its chat template leaves out what the {role} says", f"use another template, or no {role} message"
                )
        self._checked_roles.add(roles)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except EXPRESSION_ERRORS as error:
            problem = (
                f"its chat template cannot render {' + '.join(message['role'] for message in messages)} messages ({_line(error)})"
            )
            raise ChatError(problem, "use another template, or other messages") from error

    @cached_property
    def _tokens(self) -> set[int]:
        return set(self._tokenizer.get_vocab().values())

    def _template_end(self) -> int | None:
        """The first control token after what the assistant has said."""
        *_, answer = messages = probe(("user", "assistant"))
        whole = self._render(messages)
        if answer["content"] not in whole:
            return None
        names = set(self._control.ids.values())
        encoding = self._tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False)
        said = whole.rindex(answer["content"]) + len(answer["content"])
        return next((id for id, (_, end) in zip(encoding.ids, encoding.offsets) if end > said and id in names), None)

    def _stop_ids(self, sources: dict[str, list[int]]) -> list[int]:
        stop_ids = sorted(set(chain.from_iterable(sources.values())))
        remedy = f"correct eos_token_id in {' and '.join(EOS_FILES)}"
        if not stop_ids:
            raise ChatError("nothing says which token ends a response", f"set eos_token_id in {EOS_FILES[0]}")
        added = self._tokenizer.added_tokens_decoder
        for file in EOS_FILES:
            for id in sources[file]:
                if id not in added:
                    known = id in self._tokens
                    token = (
                        f"the ordinary token {self._tokenizer.convert_ids_to_tokens(id)!r}"
                        if known
                        else "no token of its tokenizer"
                    )
                    raise ChatError(f"its {file} has eos_token_id {id}, which is {token}", remedy)
        first = set(sources[EOS_FILES[0]] or sources[EOS_FILES[1]])
        if any(not first.issuperset(ids) for ids in sources.values()):
            sources_say = ", ".join(f"{source} says {' '.join(map(str, ids)) or 'nothing'}" for source, ids in sources.items())
            names = " or ".join(f"{added[id].content} ({id})" for id in stop_ids)
            self.notices.append(f"the sources disagree on what ends a response ({sources_say}): {names} will")
        return stop_ids

    def _template(self) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=self._options.get("tools"))
        except ValueError as error:
            raise ChatError(f"its tokenizer has no usable chat template ({_line(error)})", "add chat_template.jinja") from error

    def _check_options(self) -> None:
        """Refuse options that the chat template never reads.

        Raises:
            ChatError: names the option.
        """
        source = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", self._template())  # transformers' own tags
        try:
            read = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
        except TemplateError as error:
            raise ChatError(f"its chat template is not Jinja ({_line(error)})", "correct it") from error
        known = sorted(read - OWN_VARIABLES)
        arguments = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"tools", "documents", "kwargs"}
        for name, value in self._options.items():
            if name not in known or name in arguments:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"it reads: {', '.join(known)}" if known else "it has no options"
                raise ChatError("the chat template never reads it", remedy, option=name)
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                remedy = f"write {value.strip().lower()} without quotes"
                raise ChatError("is a text, which a template takes for true", remedy, option=name)
        if "strftime_now" in read and not {"date_string", "date"} & self._options.keys():
            remedy = next((f"; template_options.{name} fixes it" for name in ("date_string", "date") if name in read), "")
            self.notices.append(f"the chat template writes today's date into prompts{remedy}")

    def _look_closer(self) -> None:
        """Strings that the template writes as if they were control tokens, and that the tokenizer splits."""
        rendered = self._render(probe(("user",)), add_generation_prompt=True)
        strange = sorted({name for name in LOOKS_LIKE_CONTROL.findall(rendered) if name not in self._control.ids})
        if strange:
            self.notices.append(
                f"the chat template writes {', '.join(strange)}, which the tokenizer does not know: it is plain text to the model"
            )


def probe(roles: tuple[str, ...]) -> list[dict[str, str]]:
    """Messages that say words of their own."""
    return [{"role": role, "content": f"probe{number}word"} for number, role in enumerate(roles)]


def _read(model: str, file: str) -> dict:
    path = Path(model) / file
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatError(f"its {file} is not JSON ({_line(error)})", "copy it again") from error
    if not isinstance(content, dict):
        raise ChatError(f"its {file} is not a JSON object", "copy it again")
    return content


def _eos_ids(model: str, file: str) -> list[int]:
    value = _read(model, file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ChatError(f"its {file} has eos_token_id {value!r}", "give a token's number, or a list of them")
    return ids


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
