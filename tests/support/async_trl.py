"""TRL's AsyncGRPOTrainer on a CPU: its kernels, inference server and weight transfer are stand-ins."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from small_trl import GROUP_SIZE, PLAIN, PROMPTS, digits, small_model
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


class Digits(PreTrainedTokenizerFast):
    """A tokenizer whose answers are text."""

    chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

    def parse_response(self, ids: list[int], **_: Any) -> dict[str, str]:
        return {"role": "assistant", "content": self.decode(ids)}


class Attention:
    """Attention within segments of queries, keys and values, as TRL's flash-attention kernel computes it."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        q_ends: Any,
        k_ends: Any,
        *_: Any,
        softmax_scale: float,
        causal: bool,
        **__: Any,
    ) -> Any:
        out = []
        for at in range(len(q_ends) - 1):
            mine, keys = q[q_ends[at] : q_ends[at + 1]], slice(k_ends[at], k_ends[at + 1])
            number, length = len(mine), int(k_ends[at + 1] - k_ends[at])
            seen = torch.ones(number, length, dtype=torch.bool).tril(length - number)
            found = torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1)[None] for each in (mine, k[keys], v[keys])),
                attn_mask=seen,
                scale=softmax_scale,
                enable_gqa=True,
            )
            out.append(found[0].transpose(0, 1))
        return torch.cat(out)


class NoTransfer:
    """A weight transfer that does nothing."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


class OwnWorker:
    """A rollout worker that follows TRL's protocol: groups of random digits, scored by `reward`.

    Args:
        reward: a function that gets an answer and a random generator, and returns the reward.
        lag: the age of a group in versions.
    """

    def __init__(self, reward: Callable[[np.ndarray, Any], float], lag: Callable[[Any], int] = lambda _: 0):
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.reward, self.lag, self.version, self.sent = reward, lag, 0, list[Any]()
        self.stopped = threading.Event()

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()

    def update_model_version(self, version: int) -> None:
        self.version = version

    def check_health(self, stale_after_s: float) -> None:
        assert not self.stopped.is_set()

    def run(self) -> None:
        random, group = np.random.default_rng(0), 0
        while not self.stopped.is_set():
            if self.rollout_buffer.qsize() > 4 * GROUP_SIZE:
                time.sleep(0.001)
                continue
            self.put(group, random, self.version - min(self.version, self.lag(random)))
            group += 1

    def put(self, group: int, random: Any, version: int) -> None:
        """Put a group's samples, as TRL's own worker scores them."""
        answers = [random.integers(2, 12, random.integers(1, 5)) for _ in range(GROUP_SIZE)]
        rewards = np.array([self.reward(answer, random) for answer in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for answer, reward, advantage in zip(answers, rewards, advantages, strict=True):
            mask = np.array([0, 0] + [1] * len(answer))
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([[2, 3], answer]),
                completion_mask=mask,
                old_log_probs=(mask * -np.log(12)).astype(np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=group,
                metrics={"reward": float(reward), "reward_std": float(rewards.std())},
            )
            self.sent.append((sample, float(advantage)))
            self.rollout_buffer.put(sample)


def stand_in(patch: Any) -> None:
    """Replace only the parts of TRL that need a GPU."""
    patch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    patch.setattr(packing, "_flash_attn", lambda: Attention)
    patch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)  # only the server needs vLLM


def async_trainer(folder: Path, *, steps: int = 10, **options: Any) -> Any:
    """An AsyncGRPOTrainer that trains two groups of four per step."""
    small_model().save_pretrained(folder / "model")
    tokenizer = digits(Digits)
    tokenizer.chat_template, tokenizer.response_template = Digits.chat_template, "text"
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": GROUP_SIZE,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 4,
        "max_steps": steps,
        "token_budget": 0,
        "logging_steps": 1,
        "bf16": False,
    }
    given = {name: options.pop(name) for name in ("rollout_worker", "reward_funcs") if name in options}
    made = AsyncGRPOTrainer(
        model=str(folder / "model"),
        args=AsyncGRPOConfig(**settings | PLAIN | options),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": each}] for each in PROMPTS]}
        ),
        processing_class=tokenizer,
        weight_transfer=NoTransfer(),
        **{"reward_funcs": [len]} | given,
    )
    made.remove_callback(PrinterCallback)
    return made


def ones(completions: Any, completion_ids: Any, **others: Any) -> list[float]:
    """The number of ones in each answer. Pickle sends this function to the child process by name."""
    return [float(sum(each == 3 for each in ids)) for ids in completion_ids]


class Server:
    """A stand-in for the inference server: answers are random digits, and some take longer.

    Attributes:
        versions: the version of each answer, in the order of the requests.
    """

    def __init__(self) -> None:
        random, lock = np.random.default_rng(0), threading.Lock()
        outer, self.requests = self, 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    outer.requests += 1
                    ids = [*random.integers(2, 6, random.integers(1, 4)).tolist(), 1]
                    slow = random.random() < 0.1
                time.sleep(0.1 if slow else 0.001)
                answer = {"token_ids": ids, "logprobs": {"token_logprobs": [-float(np.log(12))] * len(ids)}}
                body = json.dumps({"choices": [answer]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the child process has ended
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
