// A CUDA that does nothing, for a torch built without it: what fake tensors ask of a device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

using c10::Device;
using c10::DeviceType;

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  const Device first{DeviceType::CUDA, 0};
  Device exchangeDevice(Device) const override { return first; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  Device getDevice() const override { return first; }
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, first); }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
} // namespace

// These stand in for torch's own, as this library is preloaded.
namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
__attribute__((visibility("default"))) bool isAccelerator(DeviceType type) { return type == DeviceType::CUDA; }
} // namespace at::accelerator

namespace at::detail {
__attribute__((visibility("default"))) const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
} // namespace at::detail
