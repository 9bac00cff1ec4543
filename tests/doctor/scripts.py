"""Training scripts with one mistake each, as users write them, and healthy ones."""

from __future__ import annotations

_BEGIN = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
"""
_MODEL = "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))\n"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
_ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
_SCALER = "scaler = torch.amp.GradScaler('cpu')\n"
_FOR = "for _ in range(9):"
_STEP = """
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
_ENCODER = """
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=%s)
body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
model = nn.Sequential(body, nn.Linear(8, 4))
x = torch.randn(16, 5, 8)
"""
_POST_NORM = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return self.norm(x + self.mlp(x))
model = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 4))
"""
_LORA = """
class Lora(nn.Module):
    def __init__(self, size, rank):
        super().__init__()
        self.base = nn.Linear(size, size)
        self.lora_A = nn.Parameter(torch.randn(rank, size))
        self.lora_B = nn.Parameter(torch.zeros(size, rank))
    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T
model = nn.Sequential(Lora(8, %d), nn.ReLU(), Lora(8, %d), nn.Linear(8, 4))
"""
_TIED = """
import types
class Tied(nn.Module):
    config = types.SimpleNamespace(tie_word_embeddings=True)
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    def get_input_embeddings(self): return self.embedding
    def get_output_embeddings(self): return self.head
    def forward(self, tokens): return self.head(self.embedding(tokens))
x = torch.randint(0, 20, (16,))
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
_LORA_FROZEN = "for n, p in model.named_parameters(): p.requires_grad_('lora_' in n)\n"
_DATA = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return %d
    def __getitem__(self, i):
        import time; seconds = %s; seconds and time.sleep(seconds)  # sleep(0) yields the core to whoever waits
        return torch.randn(8), i %% 4
loader = torch.utils.data.DataLoader(Data(), batch_size=%d%s)
"""
_EPOCHS = """
for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
_NORMED = "model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))\n"
_LISTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(3)]
        self.head = nn.Linear(8, 4)
        %s
    def forward(self, x):
        for layer in self.layers: x = layer(x).relu()
        return self.head(x)
model = Net()
"""
_SUMMED = """
total = 0.0
def train():
    global total
    for _ in range(9):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss / 2).backward()
        optimizer.step()
        total += %s
train()
"""
_METER = """
class Meter:
    def __init__(self): self.values, self.last = [], None
meter = Meter()
for _ in range(9):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
_SORTED = """
x, y = torch.randn(64, 8), torch.arange(64) %% 4
%s
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8%s)
"""
_FOLDER = """
class Folder(torch.utils.data.Dataset):
    def __init__(self): self.targets = [number // 16 for number in range(64)]
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randn(8), self.targets[i]
loader = torch.utils.data.DataLoader(%s, batch_size=8%s)
"""
_STEP_LR = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"


def _loop(*lines: str) -> str:
    return "for step in range(9):\n" + "".join(f"    {line}\n" for line in lines)


_LOSS = "loss = F.cross_entropy(model(x), y)"
_SQUARES = "optimizer.zero_grad()", "(model(x) - 1).square().mean().backward()", "optimizer.step()"
_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
_AUTOCAST = "with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x), y)"

PLANTED = {
    "data-parallel": _BEGIN + "model = nn.DataParallel(nn.Linear(8, 4))\n" + _SGD + _FOR + _STEP,
    "adam-weight-decay": _BEGIN + _MODEL
    + "optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)\n" + _FOR + _STEP,
    "decay-on-norms": _BEGIN + _MODEL
    + "optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)\n" + _FOR + _STEP,
    "betas-swapped": _BEGIN + _MODEL
    + "optimizer = torch.optim.AdamW(model.parameters(), betas=(0.999, 0.9))\n" + _FOR + _STEP,
    "rate-high": _BEGIN + _MODEL + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
    + _FOR + _STEP,
    "rate-zero": _BEGIN + _MODEL + _ADAMW
    + "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)\n"
    + _FOR + _STEP + "    scheduler.step()\n",
    "fp16-weights": _BEGIN + _MODEL + "model.half(); x = x.half()\n" + _SGD + _FOR + _STEP,
    "fp16-without-scaler": _BEGIN + _MODEL + _SGD
    + _loop("optimizer.zero_grad()", _AUTOCAST, "loss.backward()", "optimizer.step()"),
    "pure-bf16": _BEGIN + _MODEL + "model.bfloat16(); x = x.bfloat16()\n" + _ADAMW + _FOR + _STEP,
    "clip-before-unscale": _BEGIN + _MODEL + _SGD + _SCALER
    + _loop("optimizer.zero_grad()", _AUTOCAST, "scaler.scale(loss).backward()", _CLIP, "scaler.step(optimizer)",
            "scaler.update()"),
    "clip-after-step": _BEGIN + _MODEL + _SGD
    + _loop("optimizer.zero_grad()", _LOSS, "loss.backward()", "optimizer.step()", _CLIP),
    "scaled-step": _BEGIN + _MODEL + _SGD + _SCALER
    + _loop("optimizer.zero_grad()", _AUTOCAST, "scaler.scale(loss).backward()", "optimizer.step()"),
    "scaler-with-bf16": _BEGIN + _MODEL + _SGD + _SCALER
    + _loop("optimizer.zero_grad()", _AUTOCAST.replace("float16", "bfloat16"), "scaler.scale(loss).backward()",
            "scaler.step(optimizer)", "scaler.update()"),
    "accumulation-not-normalised": _BEGIN + _MODEL + _SGD
    + _loop("for _ in range(4): F.cross_entropy(model(x), y).backward()", "optimizer.step()", "optimizer.zero_grad()"),
    "gradients-not-cleared": _BEGIN + _MODEL + _SGD + _loop(_LOSS, "loss.backward()", "optimizer.step()"),
    "no-gradient": _BEGIN + _MODEL + _SGD
    + _loop(_LOSS, "loss.backward()", "optimizer.zero_grad()", "optimizer.step()"),
    "training-in-eval-mode": _BEGIN + _MODEL + "model.eval()\n" + _SGD + _FOR + _STEP,
    "post-norm-without-warmup": _BEGIN + _POST_NORM + _ADAMW + _FOR + _STEP,
    "scheduler-never-stepped": _BEGIN + _MODEL + _SGD
    + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nfor _ in range(3):" + _STEP,
    "scheduler-before-optimizer": _BEGIN + _MODEL + _SGD
    + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    + _loop("scheduler.step()", "optimizer.zero_grad()", _LOSS, "loss.backward()", "optimizer.step()"),
    "softmax-before-cross-entropy": _BEGIN + _MODEL + "model.append(nn.Softmax(dim=1))\n" + _SGD
    + _FOR + _STEP,
    "not-in-optimizer": _BEGIN + _MODEL + "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
    + _FOR + _STEP,
    "layers-in-list": _BEGIN + _LISTED % "" + _SGD + _FOR + _STEP,
    "loss-graph-kept": _BEGIN + _MODEL + _SGD + _SUMMED % "loss",
    "input-not-normalised": _BEGIN + _MODEL + "x = (x * 60 + 128).clamp(0, 255)\n" + _SGD + _FOR + _STEP,
    "sorted-not-shuffled": _BEGIN + _MODEL + _SORTED % ("y = y.sort().values", "") + _SGD + _EPOCHS,
    "unused-parameters": _BEGIN + _MODEL + "model.spare = nn.Linear(3, 3)\n"
    + "model.forward = lambda x: model[2](model[1](model[0](x)))\n" + _SGD + _FOR + _STEP,
    "optimizer-holds-others": _BEGIN + _MODEL + _SGD + "import copy; model = copy.deepcopy(model)\n"
    + _loop("optimizer.zero_grad()", _LOSS, "loss.backward()", "optimizer.step()"),
    "batch-norm-small-batch": _BEGIN + _NORMED + "x, y = x[:2], y[:2]\n" + _SGD + _FOR + _STEP,
    "last-batch-of-one": _BEGIN + _NORMED + _DATA % (33, 0, 8, "") + _SGD + _EPOCHS,
    "frozen-batch-norm-learns": _BEGIN + _NORMED + "model[1].requires_grad_(False)\n" + _SGD + _FOR + _STEP,
    "anomaly-mode": _BEGIN + "torch.autograd.set_detect_anomaly(True)\n" + _MODEL + _SGD + _FOR + _STEP,
    "more-workers-than-cores": _BEGIN + _MODEL + "import os\n"
    + _DATA % (64, 0, 16, ", num_workers=len(os.sched_getaffinity(0)) + 1") + _SGD + _EPOCHS,
    "input-bound": _BEGIN + _MODEL + _DATA % (64, 0.01, 16, "") + _SGD + _EPOCHS,
    "lora-base-not-frozen": _BEGIN + _LORA % (8, 8) + _ADAMW + _FOR + _STEP,
    "lora-rank": _BEGIN + _LORA % (1, 1) + _LORA_FROZEN
    + "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])\n" + _FOR + _STEP,
    "lora-targets": _BEGIN + _LORA % (8, 8) + "model[2] = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))\n"
    + _LORA_FROZEN + "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])\n"
    + _FOR + _STEP,
    "tie-broken": _BEGIN + _TIED + _FOR + _STEP,
    "frozen-in-optimizer": _BEGIN + _MODEL + "model[0].requires_grad_(False)\n" + _ADAMW + _FOR + _STEP,
    "loss-not-finite": _BEGIN + _MODEL + "x[0] = float('nan')\n" + _SGD + _FOR + _STEP,
    "error": _BEGIN + _MODEL + _SGD + "for step in range(9):" + _STEP + "    assert step < 1, 'out of data'\n",
    "no-step": _BEGIN + _MODEL + "print(model(x).shape)\n",
}  # fmt: skip
"""Name of the finding -> a script with the mistake."""

PLANTED_AGAIN = {
    "a list of losses, in an object": ("loss-graph-kept", _BEGIN + _MODEL + _SGD
    + _METER + "    meter.values.append(loss)\n"),
    "one column of another scale": ("input-not-normalised",
    _BEGIN + _MODEL + "x[:, 3] *= 1e4\n" + _SGD + _FOR + _STEP),
    "labels of a folder of images": ("sorted-not-shuffled",
    _BEGIN + _MODEL + _FOLDER % ("Folder()", "") + _SGD + _EPOCHS),
    "evaluation mode, with a loss that is a module": ("training-in-eval-mode",
    _BEGIN + _MODEL + "model.eval()\nloss_of = nn.CrossEntropyLoss()\n" + _SGD
    + _loop("optimizer.zero_grad()", "loss_of(model(x), y).backward()", "optimizer.step()")),
    "evaluation mode, with a loss that has parameters": ("training-in-eval-mode", _BEGIN + _MODEL + """
class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 4))
    def forward(self, output, label): return (output - self.centers[label]).square().mean()
model.eval()
loss_of = CenterLoss()
optimizer = torch.optim.SGD([*model.parameters(), *loss_of.parameters()], lr=0.1)
""" + _loop("optimizer.zero_grad()", "loss_of(model(x), y).backward()", "optimizer.step()")),
    "a head that was replaced after the optimizer was made": ("optimizer-holds-others", _BEGIN + _MODEL + _SGD
    + "model[2] = nn.Linear(16, 4).requires_grad_(False)\n" + _FOR + _STEP),
    "a rate at which the loss grows until it overflows": ("loss-not-finite", _BEGIN + _MODEL
    + _SGD.replace("0.1", "30") + _loop(*_SQUARES)),
    "a rate at which the loss grows, with NaN where the loss does not look": ("loss-not-finite",
    _BEGIN + "x[:, 0] = float('nan')\n" + _MODEL.replace("8", "7") + _SGD.replace("0.1", "30")
    + "model.register_forward_pre_hook(lambda module, args: args[0][:, 1:])\n" + _loop(*_SQUARES)),
    "NaN among the targets of a later batch": ("loss-not-finite", _BEGIN + _MODEL + _SGD
    + "y = torch.randn(16, 4); y[12] = float('nan')\n"
    + "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)\n"
    + _EPOCHS.replace("cross_entropy", "mse_loss")),
    "a loss that is NaN by itself": ("loss-not-finite", _BEGIN + _MODEL + _SGD
    + _loop("optimizer.zero_grad()", "model(x).abs().neg().log().mean().backward()", "optimizer.step()")),
    "a loss with a NaN in its gradient": ("loss-not-finite", _BEGIN + _MODEL + _SGD
    + _loop("optimizer.zero_grad()", "output = model(x)", "((output - output).sqrt() + output).mean().backward()",
            "optimizer.step()")),
    "a schedule forgotten at the end of the epoch": ("scheduler-never-stepped",
    _BEGIN + _MODEL + _DATA % (16, 0, 8, "") + _SGD + _STEP_LR + _EPOCHS),
}  # fmt: skip
"""Other form of a mistake -> (name of the finding, a script with it)."""

_ONE_STEP = "^loss nan at step 2, after 1 optimizer step$"
REASONS = {
    "loss-not-finite": ("^loss nan at step 1, after 0 optimizer steps$", r"^NaN .* args\[0\] of Sequential, .*step 1$"),
    "a rate at which the loss grows until it overflows": (
        "^loss inf at step 4, after 3 optimizer steps$", r"from \d\.\d+ at step 1 to .*e.* at step 3, .* up to 30$"),
    "a rate at which the loss grows, with NaN where the loss does not look": ("^loss (inf|nan) at step 4", "^it grew"),
    "NaN among the targets of a later batch": (_ONE_STEP, r"batch\[1\] of the DataLoader, first at step 2$"),
    "a loss that is NaN by itself": ("^loss nan at step 1, before any step", "^no NaN .* left are"),
    "a loss with a NaN in its gradient": (_ONE_STEP, "the rate was 0.1 at most, and neither an input"),
}  # fmt: skip
"""Script -> patterns of what its one finding says, and of the reason."""

HEALTHY = {
    "plain SGD": _BEGIN + _MODEL + _SGD + _FOR + _STEP,
    "AdamW with two groups, warm-up and clipping": _BEGIN + _ENCODER % True + """
model.forward = lambda x: model[1](model[0](x)).mean(1)
flat = [p for p in model.parameters() if p.ndim < 2]
deep = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW([{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=3e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
""" + _loop("optimizer.zero_grad()", _LOSS, "loss.backward()", _CLIP, "optimizer.step()", "scheduler.step()"),
    "Post-LN with warm-up": _BEGIN + _POST_NORM + _ADAMW
    + "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)\n"
    + _FOR + _STEP + "    scheduler.step()\n",
    "fp16 with a scaler, unscaled and clipped": _BEGIN + _MODEL + _SGD + _SCALER
    + _loop("optimizer.zero_grad()", _AUTOCAST, "scaler.scale(loss).backward()", "scaler.unscale_(optimizer)", _CLIP,
            "scaler.step(optimizer)", "scaler.update()"),
    "layers in a ModuleList": _BEGIN + _LISTED.replace("[nn.Linear(8, 8) for _ in range(3)]",
    "nn.ModuleList(nn.Linear(8, 8) for _ in range(3))") % "" + _SGD + _FOR + _STEP,
    "a frozen network in a list": _BEGIN + _LISTED
    % "for layer in self.layers: layer.requires_grad_(False)" + _SGD + _FOR + _STEP,
    "layers in a list that an optimizer has": _BEGIN + _LISTED % ""
    + "optimizer = torch.optim.SGD([*model.parameters(), *(p for m in model.layers for p in m.parameters())], lr=0.1)\n"
    + _FOR + _STEP,
    "a sum of losses without their graphs": _BEGIN + _MODEL + _SGD + _SUMMED % "loss.detach()",
    "the loss of the step before": _BEGIN + _MODEL + _SGD + _METER + "    meter.last = loss\n",
    "losses of micro-batches, added up": _BEGIN + _MODEL + _SGD
    + _loop("total = sum(F.cross_entropy(model(x), y) for _ in range(4)) / 4", "optimizer.zero_grad()",
            "total.backward()", "optimizer.step()"),
    "raw images that the model normalises": _BEGIN + "model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))\n"
    + "x = (x * 60 + 128).clamp(0, 255)\n" + _SGD + _FOR + _STEP,
    "raw images that the loop normalises": _BEGIN + _MODEL + "x = (x * 60 + 128).clamp(0, 255)\n" + _SGD
    + _FOR + _STEP.replace("model(x)", "model((x - 128) / 60)"),
    "large activations behind a trained layer": _BEGIN + _MODEL
    + "model.forward = lambda x: model[2](model[0](x) * 1000)\n" + _ADAMW + _FOR + _STEP,
    "sorted and shuffled": _BEGIN + _MODEL + _SORTED % ("y = y.sort().values", ", shuffle=True") + _SGD + _EPOCHS,
    "mixed and not shuffled": _BEGIN + _MODEL + _SORTED % ("", "") + _SGD + _EPOCHS,
    "a rare class, not shuffled": _BEGIN + _MODEL
    + _SORTED % ("y = (torch.arange(64) % 16 == 3).long()", "") + _SGD + _EPOCHS,
    "sorted, in a random subset": _BEGIN + _MODEL
    + _FOLDER % ("torch.utils.data.Subset(Folder(), torch.randperm(64).tolist())", "") + _SGD + _EPOCHS,
    "sorted, with a sampler": _BEGIN + _MODEL + _FOLDER
    % ("Folder()", ", sampler=torch.utils.data.WeightedRandomSampler([1.0] * 64, 64)") + _SGD + _EPOCHS,
    "sorted, with a batch sampler": _BEGIN + _MODEL + _FOLDER
    % ("Folder()", "") + "loader = torch.utils.data.DataLoader(Folder(), batch_sampler=torch.randperm(64).split(8))\n"
    + _SGD + _EPOCHS,
    "validation on sorted data with gradients on": _BEGIN + _MODEL + _FOLDER % ("Folder()", "")
    + "trained = torch.utils.data.DataLoader(Folder(), batch_size=8, shuffle=True)\n" + _SGD
    + "for batch, label in loader: model(batch)\n" + _EPOCHS.replace("in loader", "in trained"),
    "a schedule by epoch in its first epoch": _BEGIN + _MODEL + _DATA % (64, 0, 8, "") + _SGD + _STEP_LR + _EPOCHS
    + "    scheduler.step()\n",
    "an iterator for each batch, and a schedule by steps": _BEGIN + _MODEL + _DATA % (16, 0, 8, "") + _SGD + _STEP_LR
    + _loop("x, y = next(iter(loader))", "optimizer.zero_grad()", _LOSS, "loss.backward()", "optimizer.step()",
            "step % 8 == 7 and scheduler.step()"),
    "a schedule by epoch over two epochs": _BEGIN + _MODEL + _DATA % (16, 0, 8, "") + _SGD + _STEP_LR + _EPOCHS
    + "    scheduler.step()\n",
    "bf16 autocast": _BEGIN + _MODEL + _ADAMW
    + _loop("optimizer.zero_grad()", _AUTOCAST.replace("float16", "bfloat16"), "loss.backward()", "optimizer.step()"),
    "accumulation, normalised": _BEGIN + _MODEL + _SGD
    + _loop("for _ in range(4): (F.cross_entropy(model(x), y) / 4).backward()", "optimizer.step()",
            "optimizer.zero_grad()"),
    "a loader with drop_last and a schedule by epoch": _BEGIN + _NORMED + _DATA % (33, 0, 8, ", drop_last=True") + _SGD
    + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n" + _EPOCHS + "    scheduler.step()\n",
    "a frozen backbone in eval mode": _BEGIN + """
backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()
head = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
""" + _loop("with torch.no_grad(): features = backbone(x)", "optimizer.zero_grad()",
            "F.cross_entropy(head(features), y).backward()", "optimizer.step()"),
    "a GAN": _BEGIN + """
maker, judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 1)
first = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
second = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
""" + _loop("made = maker(torch.randn(16, 2))", "first.zero_grad()", "F.softplus(-judge(x)).mean().backward()",
            "F.softplus(judge(made.detach())).mean().backward()", "first.step()", "second.zero_grad()",
            "F.softplus(-judge(made)).mean().backward()", "second.step()"),
    "gradients of each sample, by vmap": _BEGIN + _MODEL + _SGD + """
def loss_of(parameters, one, label):
    output = torch.func.functional_call(model, parameters, (one[None],))
    return F.cross_entropy(output, label[None])
each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
""" + _loop("parameters = {name: p.detach() for name, p in model.named_parameters()}",
            "grads = each(parameters, x, y)",
            "for name, p in model.named_parameters(): p.grad = grads[name].mean(0)", "optimizer.step()"),
    "a teacher in evaluation mode, beside a model that returns its loss": _BEGIN + _MODEL + """
teacher = nn.Linear(8, 4).requires_grad_(False).eval()
model.forward = lambda x, taught: F.mse_loss(model[2](model[1](model[0](x))), taught)
""" + _SGD + _loop("optimizer.zero_grad()", "model(x, teacher(x)).backward()", "optimizer.step()"),
    "LBFGS": _BEGIN + _MODEL + """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss
""" + _loop("optimizer.step(closure)"),
    "LoRA, frozen below": _BEGIN + _LORA % (4, 4) + _LORA_FROZEN
    + "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])\n" + _FOR + _STEP,
    "evaluation between steps": _BEGIN + _MODEL + _ADAMW + "for step in range(9):" + _STEP + """
    model.eval()
    with torch.no_grad(): model(x)
    model.train()
""",
    "embeddings that are tied as the config says": _BEGIN + _TIED.replace("optimizer", "model.head.weight = "
    "model.embedding.weight\noptimizer") + _FOR + _STEP,
    "checkpointed blocks and tied weights": _BEGIN + """
from torch.utils.checkpoint import checkpoint
tokens = torch.randint(0, 20, (4, 6))
embedding, block = nn.Embedding(20, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
head = nn.Linear(8, 20, bias=False)
head.weight = embedding.weight
model = nn.ModuleList([embedding, block, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""" + _loop("optimizer.zero_grad()", "hidden = embedding(tokens)",
            "hidden = hidden + checkpoint(block, hidden, use_reentrant=False)",
            "F.cross_entropy(head(hidden).flatten(0, 1), tokens.flatten()).backward()", "optimizer.step()"),
}  # fmt: skip
