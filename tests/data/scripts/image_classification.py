"""Train a small ResNet on scikit-learn's digits, with DistributedDataParallel."""

import argparse
import os
import time

import torch
import torch.distributed
import torch.utils.data
from torch import nn


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes=10, width=16):
        super().__init__()
        self.conv1 = conv3x3(1, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
        args.distributed = True
    else:
        print("Not using distributed mode")
        args.distributed = False
        args.rank = 0
        return
    backend = "nccl" if args.device == "cuda" else "gloo"
    print(f"| distributed init (rank {args.rank})", flush=True)
    torch.distributed.init_process_group(backend=backend, world_size=args.world_size, rank=args.rank)
    torch.distributed.barrier()


def load_data(args):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    dataset = torch.utils.data.TensorDataset(images, torch.tensor(labels))
    train, test = torch.utils.data.random_split(dataset, [1500, 297], torch.Generator().manual_seed(0))
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train)
    else:
        train_sampler = torch.utils.data.RandomSampler(train)
    return train, test, train_sampler


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args):
    model.train()
    start_time = time.time()
    total, running = 0, 0.0
    for i, (image, target) in enumerate(data_loader):
        if i >= args.steps:
            break
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        total += image.shape[0]
        running += loss.item() * image.shape[0]
    speed = total / (time.time() - start_time)
    if args.rank == 0:
        print(f"Epoch: [{epoch}]  loss: {running / total:.4f}  img/s: {speed:.0f}  lr: {optimizer.param_groups[0]['lr']:.5f}")


def evaluate(model, data_loader, device):
    model.eval()
    correct = total = 0
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image.to(device))
            correct += (output.argmax(1) == target.to(device)).sum().item()
            total += len(target)
    return correct / total


def main(args):
    init_distributed_mode(args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    dataset, dataset_test, train_sampler = load_data(args)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, pin_memory=args.device == "cuda"
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, num_workers=args.workers)

    print("Creating model")
    model = ResNet(num_classes=10)
    model.to(device)

    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)

    bn, rest = [], []
    for name, p in model.named_parameters():
        (bn if "bn" in name else rest).append(p)
    parameters = [{"params": rest, "weight_decay": args.weight_decay}, {"params": bn, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum, nesterov=True)

    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(args.epochs - 1, 1))
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[1])

    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu] if args.device == "cuda" else None)
        model_without_ddp = model.module

    print("Start training")
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args)
        lr_scheduler.step()
        accuracy = evaluate(model_without_ddp, data_loader_test, device)
        if args.rank == 0:
            print(f"Test:  Acc@1 {100 * accuracy:.2f}")
            if args.output_dir:
                checkpoint = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    if args.distributed:
        torch.distributed.destroy_process_group()


def get_args_parser():
    parser = argparse.ArgumentParser(description="Classification Training")
    parser.add_argument("--device", default="cpu", type=str)
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--steps", default=10**9, type=int, help="steps of an epoch at most")
    parser.add_argument("-j", "--workers", default=0, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output-dir", default="", type=str)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
