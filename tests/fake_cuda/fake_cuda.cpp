// A CUDA and a Mac's GPU that do nothing, for a torch built without them: what fake tensors ask of a device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

using c10::Device;
using c10::DeviceType;
using c10::Stream;

namespace {
template <DeviceType type>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<type> {
  const Device first{type, 0};
  Device exchangeDevice(Device) const override { return first; }
  Device getDevice() const override { return first; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, first); }
};

Guard<DeviceType::CUDA> cuda;
Guard<DeviceType::MPS> mps;
c10::impl::DeviceGuardImplRegistrar register_cuda(DeviceType::CUDA, &cuda), register_mps(DeviceType::MPS, &mps);

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
