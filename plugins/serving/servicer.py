"""The RPCs that run calls, over any engine and contract: validation, streaming, cancellation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..wire.calls import Call, Finish, FinishReason, InvalidCall, Logprobs, Output, Usage, join_logprobs
from . import admission
from .administration import Administration
from .core import Admit, rpc
from .errors import Aborted, AlreadyLive, Forbidden, Internal, Invalid, Unsupported, of_finish
from .streams import Choice, Stream


class Servicer(Administration):
    """One contract served from one engine."""

    async def Generate(self, request: Any, context: Any) -> None:
        """Run one call; chunks as tokens come when it streams, one complete a choice.

        The token loop stands here, not in a coroutine of its own: every level between gRPC and
        `write` is paid for with every token.
        """
        stream, failure = None, None
        submitted, status = False, "CANCELLED"
        try:
            stream = self._open(request, context)
            submitted = await self._submit(stream)
            write, streaming, prompt_tokens = context.write, stream.streaming, len(stream.call.token_ids)
            request_id, plain_chunks = stream.call.request_id, self.contract.plain_chunks
            plain = [plain_chunks(request_id, choice.index, prompt_tokens) for choice in stream.choices]
            unfinished = len(plain)
            while unfinished:
                while stream.quiet:
                    await stream.change()
                for choice in stream.take():
                    # Read before a write lets more arrive: a complete follows its last chunk.
                    finish, sent = choice.finish, choice.sent
                    if streaming and sent < len(choice.token_ids):
                        choice.sent = len(choice.token_ids)
                        if choice.detailed:
                            await write(self._chunk(choice, sent, prompt_tokens))
                        else:
                            new = choice.token_ids[sent:]
                            await write(plain[choice.index](new, choice.sent, choice.cached_tokens))
                    if finish is not None and not choice.completed:
                        choice.completed = True
                        unfinished -= 1
                        await write(self._complete(choice, finish, prompt_tokens))
            status = "OK"
        except Exception as error:  # noqa: BLE001  the boundary to the client: no traceback goes out
            failure = self.explain(error)
            status = failure.code.name
        finally:
            if not submitted and status != AlreadyLive.code.name:
                self._release_handoff(request)
            if stream is not None:
                self._close(stream, status)
        if failure is not None:
            await context.abort(failure.code, str(failure), failure.trailers)

    def _open(self, request: Any, context: Any) -> Stream:
        """Check everything of a request that needs no tokenizer, and register it as live."""
        call = self.contract.generate_call(request, context.invocation_metadata())
        engine = self.serving()
        if not engine.limits.generates:
            raise Unsupported("this model does not generate text")
        if self._admit is not None:
            call = self._admitted(self._admit, call, context.peer())
        admission.check_request_id(call.request_id)
        admission.check_sampling(call.sampling, engine.limits, self.contract.field)
        admission.check_rank(call.data_parallel_rank, engine.limits)
        admission.check_truncation(call.truncate_prompt_tokens, engine.limits, self.contract.field)
        if call.text is not None and not call.text:
            raise Invalid("text: is empty")
        return self.table.open(call, call.sampling.n, call.stream)

    @staticmethod
    def _admitted(admit: Admit, call: Call, peer: str) -> Call:
        try:
            return admit(call, peer)
        except PermissionError as error:
            raise Forbidden(str(error)) from error
        except ValueError as error:
            raise Invalid(str(error)) from error

    async def _submit(self, stream: Stream) -> bool:
        """Hand a live call to the engine; False when it was ended before the engine saw it."""
        engine, call = self.serving(), stream.call
        assert isinstance(call, Call)
        if call.text is not None:
            call.token_ids = await engine.tokenize(call.text, call.truncate_prompt_tokens)
        admission.truncate(call, engine.limits)
        admission.check_prompt(call.token_ids, engine.limits)
        admission.check_length(call, engine.limits, self.contract.field)
        if stream.ended:
            return False
        try:
            await engine.submit(call, stream.keys)
        except InvalidCall as error:
            raise InvalidCall(self.contract.field(error.field), error.problem) from error
        if stream.ended:
            # Aborted while its submissions were on their way: the abort may have overtaken some.
            self.spawn(self.quietly(engine.cancel(stream.keys)))
        return True

    def _release_handoff(self, request: Any) -> None:
        """The prefill side holds blocks for a decode call until somebody says that it will not come."""
        handoff = self.contract.handoff(request)
        if handoff is not None and self.engine is not None and not self.dead.is_set():
            self.spawn(self.quietly(self.engine.release_handoff(*handoff, self.table.new_key())))

    def _chunk(self, choice: Choice, sent: int, prompt_tokens: int) -> Any:
        new, choice.logprobs_sent = choice.logprobs[choice.logprobs_sent :], len(choice.logprobs)
        named, choice.named_sent = choice.token_id_logprobs[choice.named_sent :], len(choice.token_id_logprobs)
        hidden, choice.hidden_sent = choice.hidden_states[choice.hidden_sent :], len(choice.hidden_states)
        output = Output(
            request_id=choice.stream.call.request_id,
            index=choice.index,
            token_ids=choice.token_ids[sent : choice.sent],
            prompt_tokens=prompt_tokens,
            completion_tokens=choice.sent,
            cached_tokens=choice.cached_tokens,
            reasoning_tokens=choice.reasoning_tokens,
            logprobs=join_logprobs(new),
            token_id_logprobs=join_logprobs(named),
            prompt=_take_prompt(choice),
            hidden_states=hidden,
        )
        return self.contract.chunk(output)

    def _complete(self, choice: Choice, finish: Finish, prompt_tokens: int) -> Any:
        if finish.failed:
            raise of_finish(finish, "the engine failed this request")
        output = Output(
            request_id=choice.stream.call.request_id,
            index=choice.index,
            token_ids=choice.token_ids,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=choice.cached_tokens,
            reasoning_tokens=choice.reasoning_tokens,
            logprobs=join_logprobs(choice.logprobs),
            token_id_logprobs=join_logprobs(choice.token_id_logprobs),
            prompt=_take_prompt(choice),
            hidden_states=choice.hidden_states,
            kv_transfer=choice.kv_transfer,
            draft_tokens=choice.draft_tokens,
            accepted_tokens=choice.accepted_tokens,
        )
        return self.contract.complete(output, finish)

    def _close(self, stream: Stream, status: str) -> None:
        keys = self.table.close(stream)
        if keys and self.engine is not None and not self.dead.is_set():
            self.spawn(self.quietly(self.engine.cancel(keys)))
        if self._finished is not None and isinstance(stream.call, Call):
            usage = Usage(
                prompt_tokens=len(stream.call.token_ids),
                completion_tokens=sum(len(choice.token_ids) for choice in stream.choices),
                cached_tokens=stream.choices[0].cached_tokens,
            )
            self._finished(stream.call, usage, status)

    @rpc
    async def Embed(self, request: Any, context: Any) -> Any:
        """The embedding of a tokenized text."""
        call = self.contract.embed_call(request, context.invocation_metadata())
        engine = self.serving()
        admission.check_request_id(call.request_id)
        if not engine.limits.embeds:
            raise Unsupported("this model does not embed")
        admission.check_rank(call.data_parallel_rank, engine.limits)
        admission.check_prompt(call.token_ids, engine.limits, "tokenized.input_ids")
        stream = self.table.open(call)
        try:
            await engine.submit_embedding(call, stream.choices[0].key)
            while stream.quiet:
                await stream.change()
            (choice,) = stream.take()
            finish = choice.finish
            if choice.embedding is None or finish is None:
                if finish is None:
                    raise Internal("the engine returned no embedding")
                if finish.reason is FinishReason.ABORT and not finish.failed:
                    raise Aborted(finish.message or f"{call.request_id!r} was aborted")
                raise of_finish(finish, "the engine returned no embedding")
            return self.contract.embedding(choice.embedding, len(call.token_ids))
        finally:
            keys = self.table.close(stream)
            if keys and not self.dead.is_set():
                self.spawn(self.quietly(engine.cancel(keys)))

    @rpc
    async def Abort(self, request: Any, context: Any) -> Any:
        """End the named live calls with what they have so far; other ids are nobody's."""
        keys = self.table.abort(self.contract.abort_ids(request))
        if keys and self.engine is not None:
            self.spawn(self.quietly(self.engine.cancel(keys)))
        return self.contract.aborted(bool(keys))


def _take_prompt(choice: Choice) -> tuple[Sequence[int], Logprobs] | None:
    """The prompt's logprobs, once, with the tokens from their first position on."""
    call, logprobs = choice.stream.call, join_logprobs(choice.prompt_logprobs)
    if logprobs is None or not isinstance(call, Call):
        return None
    choice.prompt_logprobs = []
    return call.token_ids[call.sampling.prompt_logprobs_from :], logprobs
