"""What differs between running on CPUs and on GPUs, one file a device; everything else asks `DEVICES`."""

from megatron_drmas.devices.base import Device
from megatron_drmas.devices.cpu import Cpu
from megatron_drmas.devices.cuda import Cuda

DEVICES: dict[str, Device] = {device.name: device for device in (Cpu(), Cuda())}

__all__ = ["DEVICES", "Device"]
