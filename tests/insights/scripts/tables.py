"""A script as one writes it for Captum 0.8: a picture beside a table of measures."""

import torch
import torch.nn as nn
from captum.insights import AttributionVisualizer, Batch
from captum.insights.attr_vis.app import FilterConfig
from captum.insights.attr_vis.config import ATTRIBUTION_NAMES_TO_METHODS
from captum.insights.attr_vis.features import EmptyFeature, GeneralFeature, ImageFeature

CATEGORIES = ["sepal length", "sepal width", "petal length", "petal width"]


class Multimodal(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Flatten())
        self.measures = nn.Linear(4 + 2, 5)
        self.head = nn.Linear(3 * 9 + 5, 3)

    def forward(self, picture, measures, other, scale):
        measured = torch.tanh(self.measures(torch.cat([measures, other], 1) * scale[:, None]))
        return self.head(torch.cat([self.picture(picture), measured], 1))


flowers = [
    Batch(
        inputs=(torch.rand(3, 3, 5, 5), torch.rand(3, 4), torch.rand(3, 2)),
        labels=torch.tensor([0, 1, 2]),
        additional_args=torch.rand(3) + 1,
    )
    for _ in range(2)
]

visualizer = AttributionVisualizer(
    [Multimodal(), Multimodal()],
    ["setosa", "versicolor", "virginica"],
    [ImageFeature("Flower", None, None), GeneralFeature("Measures", CATEGORIES), EmptyFeature()],
    flowers,
    lambda output: output.softmax(1),
)
visualizer._config = FilterConfig(
    attribution_method="Feature Ablation",
    attribution_arguments={"perturbations_per_eval": 2},
    num_examples=6,
)
assert "Feature Ablation" in ATTRIBUTION_NAMES_TO_METHODS
results = visualizer.visualize()

visualizer.serve()
