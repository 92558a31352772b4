"""A script as one writes it for Captum 0.8: texts, whose embeddings are explained."""

import torch
import torch.nn as nn
from captum.attr import TokenReferenceBase, configure_interpretable_embedding_layer
from captum.insights import AttributionVisualizer, Batch
from captum.insights.attr_vis.features import TextFeature

WORDS = ["<pad>", "a", "brilliant", "dreadful", "film", "it", "was", "<b>really</b>"]


class SentimentNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 12)
        self.conv = nn.Conv1d(12, 9, 2)
        self.fc = nn.Linear(9, 1)

    def forward(self, text):
        embedded = self.embedding(text).transpose(1, 2)
        return torch.sigmoid(self.fc(torch.relu(self.conv(embedded)).amax(2)))


model = SentimentNet()
interpretable_embedding = configure_interpretable_embedding_layer(model, "embedding")
token_reference = TokenReferenceBase(reference_token_idx=WORDS.index("<pad>"))


def embed(ids):
    return interpretable_embedding.indices_to_embeddings(ids).detach()


def pad(embeddings):
    reference = token_reference.generate_reference(len(embeddings), device="cpu")
    return embed(reference[0])


def itos(ids):
    return [WORDS[i] for i in ids.squeeze(0)]


def score_func(output):
    return torch.cat([1 - output, output], dim=1)


def review_iter():
    for label in (0, 1, 1):
        yield Batch(inputs=torch.randint(1, len(WORDS), (2, 6)), labels=torch.tensor([label, 1]))


visualizer = AttributionVisualizer(
    models=model,
    classes=["negative", "positive"],
    features=TextFeature("Review", [pad], [embed], visualization_transform=itos),
    dataset=review_iter(),
    score_func=score_func,
    use_label_for_attr=False,
)

visualizer.serve()
