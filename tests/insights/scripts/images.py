"""A script as one writes it for Captum 0.8: photos of 32 x 32 pixels and a small CNN."""

import torch
import torch.nn as nn
from captum.insights import AttributionVisualizer, Batch
from captum.insights.attr_vis.features import ImageFeature


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool1, self.pool2 = nn.MaxPool2d(2, 2), nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 5 * 5, 20)
        self.fc2 = nn.Linear(20, 10)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x):
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(x.view(-1, 16 * 5 * 5))))


def get_classes():
    return ["Plane", "Car", "Bird", "Cat", "Deer", "Dog", "Frog", "Horse", "Ship", "Truck"]


def baseline_func(input):
    return input * 0


def normalize(image):
    return (image - 0.5) / 0.5


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
    features=[
        ImageFeature(
            "Photo",
            baseline_transforms=[baseline_func],
            input_transforms=[normalize],
        )
    ],
    dataset=formatted_data_iter(),
)

visualizer.serve(debug=True)
