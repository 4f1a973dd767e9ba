"""Wrong usages of the command line: each ends with a message that names the value and the remedy, and no traceback."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app

ADAPTER = """
from mint.rl import RLAdapter

class Own(RLAdapter):
    def build_dataset(self):
        return ["a"]

    def make_prompt(self, item, tokenizer):
        return tokenizer.encode(item)

    def compute_reward(self, response, item):
        return 0.0

class Forgot(RLAdapter):
    def build_dataset(self):
        return ["a"]

    def make_prompt(self, item, tokenizer):
        return tokenizer.encode(item)

class Plain:
    def build_dataset(self):
        return ["a"]

class Broken(Own):
    def __init__(self):
        raise ValueError("no such table")

class FromFile(Own):
    def __init__(self, path):
        self.rows = open(path).read()
"""

USAGES = [
    # (the command line, the value that the message names, the remedy)
    ("nonsense", "'nonsense'", "--help"),
    ("rollout latest", "'rollout'", "Did you mean 'rollouts'?"),
    ("--nonsense", "--nonsense", "--help"),
    ("train", "'recipe'", "rl, sft, dpo, distill"),
    ("train rll", "'rll'", "'rl', 'sft', 'dpo', 'distill'"),
    ("train rl", "task = (missing)", "task=math"),
    ("train rl task=maths", "task = maths", "Did you mean math?"),
    ("train rl task math", "argument = task", "task=math"),
    ("train rl task=math steps=1 steps=2", "steps = 2: is given twice", "Leave out steps=1 or steps=2"),
    ("train rl task=math lr=1 learning_rate=2", "learning_rate = 2: is given twice", "Leave out lr=1 or"),
    ("train rl =3", "argument = =3", "steps=20"),
    ("train rl task=math steps=ten", "RLConfig.steps = ten", "Give an integer, at least 0"),
    ("train rl task=math steps=-1", "RLConfig.steps = -1", "at least 0"),
    ("train rl task=math steps=1.5", "RLConfig.steps = 1.5", "Give an integer"),
    ("train rl task=math stpes=3", "stpes", "did you mean steps?"),
    ("train rl task=math group_size=0", "RLConfig.group_size = 0", "at least 2"),
    ("train rl task=math learning_rate=fast", "learning_rate = fast", "Give a number"),
    ("train rl task=math lr=-1", "learning_rate = -1", "at least 0"),
    ("train rl task=math loss_fn=pppo", "RLConfig.loss_fn = pppo", "Choose one of these"),
    ("train rl task=math trackers=wandbb", "wandbb", "'wandb'"),
    ("train rl task=math betas=3", "RLConfig.betas = 3", "Give a tuple"),
    ("train rl task=math base_model=mint/tinny", "base_model = mint/tinny", "Did you mean mint/tiny?"),
    ("train rl task=math base_model=/nope", "base_model = /nope: does not exist", "Give the path of"),
    ("train rl task=own.py:Own", "base_model = Qwen/Qwen3-0.6B", "base_model=mint/tiny"),
    ("train rl task=own.py", "task = own.py", "own.py:Own"),
    ("train rl task=own.py:Nope", "has no class Nope", "Its tasks are Own, Forgot, Broken, FromFile"),
    ("train rl task=own.py:Forgot", "task = own.py:Forgot: has no compute_reward", "Write it in the class"),
    ("doctor own.py:Forgot", "task = own.py:Forgot: has no compute_reward", "Write it in the class"),
    ("train rl task=own.py:Plain", "has no make_prompt, compute_reward", "derive it from mint.rl.RLAdapter"),
    ("train rl task=own.py:Broken", "Broken raised ValueError in line 27 of", "(no such table)"),
    ("train rl task=own.py:FromFile", "missing a required argument: 'path'", "Its options are path"),
    ("train rl task=own.py:FromFile path=nope", "FromFile raised FileNotFoundError in line 31 of", "'nope'"),
    (
        "train rl task=own.py:RLAdapter",
        "names mint.rl.adapter.RLAdapter, which is no task",
        "Its tasks are Own, Forgot",
    ),
    ("train rl task=nope.py:Own", "task = nope.py:Own", "Choose math"),
    ("train rl task=file:/nope.jsonl", "path = /nope.jsonl", "Give a .jsonl"),
    ("train rl task=file:empty.jsonl", "path = empty.jsonl", "prompt"),
    ("train rl task=math run_dir=/proc/x", "run_dir = /proc/x", "Name a folder that you may write"),
    ("train rl task=math --resume", "resume = True", "--run-dir"),
    ("train rl --steps 3", "--steps", "Write steps=3"),
    ("train rl --task math", "--task", "Write task=math"),
    ("train rl task=math --learning-rate=1e-3", "--learning-rate", "Write learning_rate=1e-3"),
    ("train sft --steps 3", "--steps", "No such option"),
    ("train rl task=math --stop --json", "--stop", "Write stop=VALUE"),
    ("train grpo task=math", "grpo", "rl is GRPO. Write mint train rl"),
    ("demo math steps=3", "steps=3", "Write --steps 3"),
    ("demo math lr=1", "lr=1", "mint train rl takes settings"),
    ("train rl task=math --run-di x", "--run-di", "--run-dir"),
    ("train rl task=math problems=many base_model=mint/tiny", "task math: problems = many", "It takes Iterable"),
    ("train rl task=math train_size=few base_model=mint/tiny", "task math: train_size = few", "It takes int"),
    ("train rl task=math grader=5 base_model=mint/tiny", "task math: grader = 5", "It takes str"),
    ("train rl task=math prompt_style=nope base_model=mint/tiny", "prompt_style = nope", "Choose chat or plain"),
    ("doctor math train_size=-5 base_model=mint/tiny", "train_size = -5", "Give 0 to 13412"),
    ("train rl task=chat judge=gpt base_model=mint/tiny", "task chat: judge = gpt", "It takes PairwiseJudge"),
    ("train rl task=code unsafe_sandbox=7 base_model=mint/tiny", "unsafe_sandbox = 7", "It takes bool"),
    ("train rl task=file:binary.jsonl base_model=mint/tiny", "binary.jsonl:1 = ", "Write one JSON object per line"),
    ("train dpo data=binary.jsonl base_model=mint/tiny", "binary.jsonl:1 = ", "Write one JSON object per line"),
    ("train dpo data=mixed.jsonl base_model=mint/tiny", "mixed.jsonl:2: prompt = 5", "Write a text, or [{"),
    ("train dpo data=.", "data = .: is not a file", "Give a .jsonl file"),
    ("train rl task=math steps=", "RLConfig.steps = ", "Give an integer"),
    ("train rl task=math stop=END", "RLConfig.stop = END", "Give a list"),
    ("train rl task=math betas=[0.9,1]", "RLConfig.betas = (0.9, 1.0)", "Try (0.9, 0.999)"),
    ("train rl task=math init_optimizer=yes", "init_optimizer = True", "Name the checkpoint"),
    ("train rl task=math init_from=nope", "init_from = nope", "`mint runs list`"),
    ("train rl task=math kl_reference=nope", "kl_reference = nope", "`mint runs list`"),
    ("eval mint/tiny math --against mint/tiny", "'mint/tiny', 'mint/tiny'", "Name each checkpoint once"),
    ("train sft", "task = (missing)", "task=…"),
    ("train sft data=pairs.jsonl", "task = (missing)", "for example task=file:pairs.jsonl"),
    ("train sft task=chat epochs=-1", "SFTConfig.epochs = -1", "at least 1"),
    ("train dpo", "data = (missing)", "data=…"),
    ("train dpo data=/nope.jsonl", "data = /nope.jsonl", "Give a .jsonl file"),
    ("train distill task=math", "teacher = (missing)", "teacher=…"),
    ("demo maths", "'maths'", "'math', 'chat'"),
    ("demo mahts", "'mahts'", "Did you mean math?"),
    ("demo math --steps=-3", "'-3'", "at least 0"),
    ("demo math --seed x", "'x'", "a whole number"),
    ("demo math --trackers wandbb", "wandbb", "'wandb'"),
    ("serve --port 99999", "--port = 99999", "at most 65535"),
    ("serve --port x", "'x'", "a whole number"),
    ("serve --host 0.0.0.0", "--host = 0.0.0.0", "mint keys create"),
    ("serve --data-dir /proc/x", "--data-dir = /proc/x", "choose another one"),
    ("serve --config /nope.toml", "--config = /nope.toml", "Give a TOML file"),
    ("recover --data-dir /nope", "--data-dir = /nope", "Give the directory"),
    ("export latest", "--output", "Write for example mint export latest --output"),
    ("export nope --format pef --output out", "'pef'", "Did you mean peft?"),
    ("eval latest", "'task'", "Write for example mint eval latest math"),
    ("diagnose latest latest", "(latest)", "Write for example mint diagnose latest"),
    ("export nope --output out", "nope", "`mint runs list`"),
    ("export mint://nope/weights/x --output out", "data_dir = ", "Set MINT_HOME"),
    ("export latest --format foo --output out", "'foo'", "'peft', 'hf', 'gguf-ready'"),
    ("dashboard /nope", "/nope", "Name a run folder"),
    ("dashboard --start-runs --task nope.py:X", "--task = nope.py:X: is not a file", "path.py:Class"),
    ("dashboard --start-runs --task maths", "task = maths", "Did you mean math?"),
    ("dashboard --port 99999", "'99999'", "at most 65535"),
    ("rollouts nope", "run = nope", "`mint runs list`"),
    ("rollouts nope --step x", "'x'", "a whole number"),
    ("plot nope", "--output", "--help"),
    ("eval mint/tiny maths", "task = maths", "Did you mean math?"),
    ("eval mint/tiny math --seeds 0", "'0'", "at least 1"),
    ("diagnose nope", "run = nope", "`mint runs list`"),
    ("bisect /nope", "run = /nope", "`mint runs list`"),
    ("bisect nope --metric heldot", "metric = heldot", "heldout, heldout_sampled, success"),
    ("doctor cod", "task = cod", "Did you mean code?"),
    ("plan", "--pass-rate and --model", "Give --pass-rate"),
    ("plan --pass-rate 2", "'2'", "at most 1"),
    ("bench --dtype int3", "'int3'", "'float32', 'bfloat16'"),
    ("chaos --kills=-1", "'-1'", "at least 0"),
    ("chaos --faults nope", "--faults = nope", "disk-full"),
    ("keys create", "--owner", "Write for example mint keys create --owner"),
    ("keys revoke nope --data-dir /nope", "--data-dir = /nope", "mint serve"),
    ("models pull", "'name'", "--help"),
    ("runs show nope", "run = nope", "`mint runs list`"),
    ("runs stop nope", "run = nope", "`mint runs list`"),
    ("runs list --data-dir /nope", "data_dir = /nope", "--data-dir"),
    ("checkpoints list --limit=-1", "'-1'", "at least 1"),
    ("sessions list --data-dir /nope", "data_dir = /nope", "MINT_HOME"),
    # signs that a keyboard or a program for texts puts in the place of plain ones
    ("train rl task＝math", "argument = task＝math", "task=math"),
    ("train rl “task=math”", "argument = “task=math”", "Write for example task=math"),
    ("train rl task=math ‘steps=3’", "argument = ‘steps=3’", "Write for example steps=3"),
    ("train rl task=math —resume", "argument = —resume", "Write for example --resume"),
    ("train rl task=math ｓteps=3", "{'ｓteps': 3}", "did you mean steps?"),
    ("train rl task=math steps=２０x", "RLConfig.steps = ２０x", "Give an integer"),
    ("train rl task=math base_model=mint／tiny", "base_model = mint／tiny", "Did you mean mint/tiny?"),
    # numbers
    ("train rl task=math seed=abc", "RLConfig.seed = abc", "Give an integer, at least 0"),
    ("doctor math seed=abc", "RLConfig.seed = abc", "Give an integer, at least 0"),
    ("train sft task=chat seed=1.5", "SFTConfig.seed = 1.5", "Give an integer, at least 0"),
    ("train rl task=math steps=1e9999", "RLConfig.steps = inf", "Give an integer"),
    ("train rl task=math learning_rate=nan", "learning_rate = nan", "must be a finite number"),
    ("train rl task=math rank=100000", "RLConfig.rank = 100000", "at most 256"),
    ("train dpo data=empty.jsonl beta=-1", "DPOConfig.beta = -1.0", "above 0"),
    ("train distill task=math teacher=mint/tiny steps=x", "DistillConfig.steps = x", "Give an integer"),
    ("bench --batch-size 999999999", "'999999999'", "at most 4096"),
    ("bench --max-tokens 1", "'1'", "at least 2"),
    ("plan --model mint/tiny --context 99999999", "--context = 99999999", "Give at most 1024"),
    ("plan --model mint/tiny --device tpu", "'tpu'", "'cpu', 'cuda'"),
    ("eval mint/tiny math --heldout-samples x", "'x'", "a whole number"),
    ("rollouts nope --worst=-1", "'-1'", "at least 0"),
    ("scale --samplers=-1", "'-1'", "at least 1"),
    ("checkpoints ttl nope x", "nope", "`mint runs list`"),
    # names
    ("eval mint/tyni math", "base_model = mint/tyni", "Did you mean mint/tiny? `mint runs list` shows the runs"),
    ("eval nope math", "base_model = nope", "`mint runs list` shows the runs"),
    ("models pull mint/tinny", "base_model = mint/tinny", "Did you mean mint/tiny?"),
    ("models pull ../..", "model = ../..", "organisation/model"),
    ("models lst", "'lst'", "Did you mean 'list'?"),
    ("train rl task=", "task = ", "Choose math"),
    ("train rl task=own.py:", "task = own.py:", "own.py:Own"),
    ("train distill task=math teacher=mint/tinny", "teacher = mint/tinny", "Did you mean mint/tiny?"),
    ("chaos --faults disk-full,nope", "--faults = nope", "read-only"),
    ("keys create --owner ''", "owner = ", "1 to 128 printable characters"),
    ("keys create --owner local", "owner = local", "'local' is taken"),
    ("serve --logprobs-mode x", "--logprobs-mode = x", "'raw' or 'processed'"),
    ("serve --cluster nope", "--cluster = nope", "ray://10.0.0.1:10001"),
    ("rollouts nope --flag", "--flag", "requires an argument"),
    ("runs show ../..", "run = ../..", "`mint runs list`"),
    # files and folders
    ("train rl task=file:own.py base_model=mint/tiny", "path = own.py: has no ending that mint reads", ".parquet"),
    ("train rl task=broken.py:Own", "SyntaxError: invalid syntax (broken.py, line 1)", "`python broken.py`"),
    ("train rl task=math run_dir=own.py base_model=mint/tiny", "run_dir = own.py", "Name a folder that you may write"),
    ("train rl task=math base_model=folder", "base_model = folder", "lacks config.json"),
    ("train dpo data=pairs.jsonl", 'pairs.jsonl:1 = {"prompt": "a"}: is not a pair', '"rejected"'),
    ("doctor file:pairs.jsonl prompt_key=q", "pairs.jsonl:1 = fields prompt", "prompt_key"),
    ("serve --config own.py", "--config = own.py", "Give a TOML file"),
    ("serve --config folder", "--config = folder", "Give a TOML file"),
    ("serve --data-dir own.py", "own.py: cannot be made", "choose another one"),
    ("keys create --owner a --data-dir own.py", "own.py: cannot be made", "choose another one"),
    ("keys create --owner a --data-dir /proc/x", "--data-dir = /proc/x", "choose another one"),
    ("keys list --data-dir folder", "folder: holds no server's data", "mint serve"),
    ("recover --data-dir own.py", "own.py: holds no data of mint", "MINT_HOME"),
    ("chaos --keep own.py", "--keep = own.py", "Name a folder that does not exist"),
    ("dashboard own.py", "RUNS = own.py: is not a folder", "`mint runs list`"),
    ("export own.py --output out", "run = own.py", "`mint runs list`"),
    ("eval mint/tiny math --plot /nope/x.png", "output = /nope/x.png", "in a folder that exists"),
    ("serve --port TAKEN", "cannot be listened on", "0 for any that is free"),
    ("dashboard --port TAKEN", "cannot be listened on", "0 for any that is free"),
    ("dashboard --host 0.0.0.0", "--host = 0.0.0.0", "mint keys create"),
    ("scale", "numbers = (none)", "--trainers, --samplers or both"),
    # what would have no effect, or would wait for ever
    ("serve --trainers 3", "--trainers = 3: has no effect without a cluster", "Add --cluster local"),
    ("serve --shard-base", "--shard-base = True: has no effect", "Add --cluster local"),
    ("serve --tensor-parallel 2", "--tensor-parallel = 2: has no effect", "Add --cluster local"),
    ("worker --join nope", "--join = nope: is not the address of a server", "http://HOST:PORT"),
    ("worker", "'--join'", "--help"),
    ("train rl task=settings.py:Own", "settings.py: DEMO = {'steps': 3}: is no RLConfig", "DEMO = RLConfig(…)"),
    ("train rl task=own.py:Own base_model=", "base_model = : is not a known base model", "mint models pull NAME"),
    ("serve --model mint/tny", "base_model = mint/tny", "Did you mean mint/tiny?"),
    ("serve --sampler vllm=nope", "--sampler = vllm=nope", "vllm=http://HOST:PORT"),
    ("status --base-url nope", "--base-url", "--url"),
    ("checkpoints download nope", "run = nope", "`mint runs list`"),
    ("export mine --output out", "run = mine", "`mint checkpoints list` has the whole path of each checkpoint"),
    ("plan --model mint/tiny --gpus eight", "--gpus = eight", "Write 8xH100"),
    ("plan --model mint/tiny --context 16kk", "'16kk'", "write 2048 or 16k"),
    ("train rl task=math base_model=mint/tiny temperature=-1", "RLConfig.temperature = -1.0", "above 0"),
    ("train distill task=math teacher=mint/tiny student=x", "{'student': 'x'}", "Its options are"),
    ("export nope --format hf --output own.py", "run = nope", "`mint runs list`"),
]


def test_there_are_sixty_wrong_usages_and_more() -> None:
    assert len({line for line, _, _ in USAGES}) == len(USAGES) > 60


@pytest.mark.parametrize(("line", "value", "remedy"), USAGES, ids=[line for line, _, _ in USAGES])
def test_a_wrong_usage_is_a_message_with_the_value_and_the_remedy(
    line: str, value: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MINT_BASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(ADAPTER)
    Path("empty.jsonl").write_text("")
    Path("binary.jsonl").write_bytes(b"\xff\xfe\x00\n")
    Path("broken.py").write_text("def f(:\n")
    Path("pairs.jsonl").write_text('{"prompt": "a"}\n')
    Path("mixed.jsonl").write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": 5, "chosen": "b", "rejected": "c"}\n'
    )
    Path("settings.py").write_text("from own import Own\nDEMO = {'steps': 3}\n")
    Path("folder").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = shlex.split(line.replace("TAKEN", str(taken.getsockname()[1])))
        answer = CliRunner().invoke(app, words)
    said = re.sub(r"[\s│]+", " ", answer.stderr)
    assert answer.exit_code in (1, 2)
    assert answer.exception is None or isinstance(answer.exception, SystemExit)
    assert "Traceback" not in said
    assert value in said, said
    assert remedy in said, said
    assert not list(tmp_path.glob("home/runs/*")), "a refused command leaves no run"


def test_a_misspelt_bundled_model_has_one_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    monkeypatch.delenv("MINT_BASE_URL", raising=False)
    answer = CliRunner().invoke(app, ["train", "rl", "task=math", "base_model=mint/tny"])
    assert answer.exit_code == 1 and answer.stderr.rstrip().endswith("Did you mean mint/tiny?"), answer.stderr


@pytest.mark.parametrize("line", ["train rl task=math --resume", "train sft task=math --resume"])
def test_a_resume_without_a_folder_is_refused_before_anything_is_told(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    answer = CliRunner().invoke(app, [*shlex.split(line), "base_model=mint/tiny"])
    assert answer.exit_code == 1 and answer.stderr.startswith("InvalidRequestError: resume = True"), answer.stderr


@pytest.mark.parametrize("words", ["nope math", "mint/tiny math --against mint/tinny", "mint/tiny maths"])
def test_an_evaluation_of_a_wrong_name_is_refused_before_the_service_is_opened(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MINT_BASE_URL", raising=False)
    answer = CliRunner().invoke(app, ["eval", *words.split()])
    assert answer.exit_code == 1
    assert not (tmp_path / "home").exists(), "the service makes its folder when it is opened"


def test_help_lists_the_second_spelling_of_a_setting() -> None:
    answer = CliRunner().invoke(app, ["train", "rl", "--help"])
    assert "  learning_rate or lr (" in answer.stdout and "  base_model or model (" in answer.stdout


def test_a_setting_that_is_not_similar_is_not_suggested() -> None:
    answer = CliRunner().invoke(app, ["train", "sft", "task=math", "steps=3"])
    assert answer.exit_code == 1 and "steps" in answer.stderr
    assert "did you mean" not in answer.stderr, answer.stderr
