"""Conversations with a tiny language model in TorchRL: messages, generation as text and as messages, advantages of groups."""

from __future__ import annotations

import string

import torch
from report import report
from tensordict import NonTensorStack, TensorDict, lazy_stack, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import MCAdvantage
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

#: Llama 3 and others refuse a message that has calls, and not one.
TEMPLATE = (
    "{% for message in messages %}{% if 'tool_calls' in message and message['tool_calls'] | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
QUERIES = ("hello?", "two plus four")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters."""
    words = [*SPECIAL, *string.ascii_letters, *string.digits, *"?.,<>|_ \n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def make_trajectory(query: str, reward: float, steps: int) -> TensorDict:
    """Return the steps of an answer, of which the last one gets the reward."""
    done = torch.arange(steps).unsqueeze(-1) == steps - 1
    after = TensorDict(done=done, reward=torch.full((steps, 1, 1), reward), batch_size=[steps])
    rows = {"query": NonTensorStack(*[query] * steps), "place": torch.arange(steps), "next": after}
    return TensorDict(rows, batch_size=[steps])


set_list_to_stack(True).set()
torch.manual_seed(0)
tokenizer = make_tokenizer()
size = GPT2Config(
    vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=256, pad_token_id=0, eos_token_id=1
)
model = GPT2LMHeadModel(size).eval()

talk = lazy_stack([History(role="user", content="hi"), History(role="assistant", content="yes")])
longer = talk.append(History(role="user", content="two?"), inplace=False)
ragged = lazy_stack([longer, talk])
report("messages", talk.tolist(), longer.content, [h.role for h in ragged.unbind(0)])
report("joined", talk.extend(longer, inplace=False).content, ragged.get("content", as_list=True))
for history in (talk, lazy_stack([talk, talk]), ragged):
    text = history.apply_chat_template(tokenizer=tokenizer, tokenize=False, add_generation_prompt=False)
    report("template", text)
tokens = longer.apply_chat_template(tokenizer=tokenizer, return_dict=True, return_assistant_tokens_mask=True)
report("tokens", tokens["input_ids"], tokens["assistant_masks"].sum())

for mode in ("text", "history"):
    for pads in (True, False):
        policy = TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode=mode,
            chat_template_name="chatml_format" if mode == "history" else None,
            pad_output=pads,
            generate_kwargs={"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0},
            return_log_probs=True,
        )
        env = ChatEnv(
            batch_size=(2,), tokenizer=tokenizer, input_mode=mode, system_prompt="a bot.", data_key="query"
        )
        data = policy(env.reset(TensorDict(query=list(QUERIES), batch_size=[2])))
        report(f"{mode}, {pads}", sorted(data.keys()), policy.out_keys)
        report("answers", data.get("text").get("response"), data.get("text").get("full", as_list=True))
        report("log", data.get(("log_probs", "response"), as_padded_tensor=True))
        step = env.step(data)
        report("step", sorted(map(str, step.keys(True))), step["next", "done"])
        if mode == "history":
            report("next", [history.tolist() for history in step["next", "history"].prompt.unbind(0)])

buffer = ReplayBuffer(storage=LazyStackStorage(20), batch_size=2)
buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="query"))
for number, (query, reward) in enumerate([("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 5.0)]):
    buffer.extend(make_trajectory(query, reward, 2 + number % 3))
rows = buffer[:]
report("advantages", len(buffer), rows["query"], rows["place"], rows["advantage"].flatten())
