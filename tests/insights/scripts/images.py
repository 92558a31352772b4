"""A script as one writes it for Captum 0.8: photos of 32 x 32 pixels and a small CNN."""

import torch
import torch.nn as nn
from captum.insights import AttributionVisualizer, Batch
from captum.insights.attr_vis.features import ImageFeature


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.relu = nn.Conv2d(3, 6, 5), nn.MaxPool2d(4), nn.ReLU()
        self.fc = nn.Linear(6 * 7 * 7, 10)

    def forward(self, x):
        return self.fc(self.pool(self.relu(self.conv(x))).view(-1, 6 * 7 * 7))


def get_classes():
    return ["Plane", "Car", "Bird", "Cat", "Deer", "Dog", "Frog", "Horse", "Ship", "Truck"]


def formatted_data_iter():
    photos = torch.utils.data.TensorDataset(torch.rand(10, 3, 32, 32), torch.arange(10))
    dataloader = iter(torch.utils.data.DataLoader(photos, batch_size=4, shuffle=False))
    while True:
        images, labels = next(dataloader)
        yield Batch(inputs=images, labels=labels)


visualizer = AttributionVisualizer(
    models=[Net()],
    score_func=lambda o: torch.nn.functional.softmax(o, 1),
    classes=get_classes(),
    features=[ImageFeature("Photo", [lambda x: x * 0], [lambda image: (image - 0.5) / 0.5])],
    dataset=formatted_data_iter(),
)

visualizer.serve(debug=True)
