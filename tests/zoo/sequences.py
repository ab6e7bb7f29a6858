"""Nets for sequences: an LSTM that tags, and a selective scan in the way of Mamba."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.case import member


def tagged(batch, length):
    return {"words": torch.randint(1, 30, (batch, length))}


@member(tagged, 6, 9)
class LstmTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(30, 8, padding_idx=0),
            nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True),
        )
        self.conv, self.fc = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 5)
        self.transitions = nn.Parameter(torch.randn(5, 5))

    def forward(self, words):
        x = self.embed(words)
        start = x.new_zeros(4, x.size(0), 8), x.new_zeros(4, x.size(0), 8)
        out, (hidden, _) = self.lstm(x, start)
        out = F.relu(self.conv(out.transpose(1, 2))).transpose(1, 2)
        scores = self.fc(out) + self.fc(hidden[-2:].transpose(0, 1).flatten(1)).unsqueeze(1)
        return scores.log_softmax(-1), self.transitions.exp()


def padded(batch, length):
    lengths = torch.arange(length, length - batch, -1).clamp(min=1)
    return {"words": torch.randint(1, 30, (batch, length)), "lengths": lengths}


@member(padded, 6, 9)
class PackedTagger(nn.Module):
    """Packs its sequences, which asks for the lengths as data: that part is an island."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.fc = nn.Embedding(30, 8), PackedGru(), nn.Linear(8, 5)

    def forward(self, words, lengths):
        return self.fc(self.encoder(self.embed(words), lengths))


class PackedGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.gru = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.GRU(8, 8, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.proj(x), lengths.tolist(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


def ids(batch, length):
    return (torch.randint(0, 30, (batch, length)),)


class Mixer(nn.Module):
    def __init__(self, width=8, states=4):
        super().__init__()
        self.states, self.rank = states, 2
        self.in_proj, self.x_proj = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(2 * width, 2 + 2 * states, bias=False),
        )
        self.conv1d = nn.Conv1d(2 * width, 2 * width, 3, groups=2 * width, padding=2)
        self.dt_proj, self.out_proj = nn.Linear(2, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(2 * width, 1))
        self.d = nn.Parameter(torch.ones(2 * width))

    def forward(self, x):
        length = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        step, b, c = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        return self.out_proj(self.scan(x, F.softplus(self.dt_proj(step)), -torch.exp(self.a_log), b, c) * F.silu(gate))

    def scan(self, x, step, a, b, c):
        batch, length, width = x.shape
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, a))
        drive = torch.einsum("bld,bln,bld->bldn", step, b, x)
        state = x.new_zeros((batch, width, self.states))
        found = []
        for i in range(length):
            state = decay[:, i] * state + drive[:, i]
            found.append(torch.einsum("bdn,bn->bd", state, c[:, i, :]))
        return torch.stack(found, dim=1) + x * self.d


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(kind)


@member(ids, 6, None)
class Mamba(nn.Module):
    """Its scan is a loop over the sequence: the length of the example is part of the graph."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"norm": RootMeanSquareNorm(8), "mixer": Mixer()}) for _ in range(2)]
        )
        self.norm_f, self.lm_head = RootMeanSquareNorm(8), nn.Linear(8, 30, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer["mixer"](layer["norm"](x)) + x
        return self.lm_head(self.norm_f(x))
