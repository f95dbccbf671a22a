// The card of the software HPU: who has it, its memory, its guard.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto HPU = c10::DeviceType::HPU;
const c10::Device DEVICE(HPU, 0);
const c10::DispatchKeySet ON_CPU(c10::DispatchKey::CPU);
const c10::DispatchKeySet ON_HPU(c10::DispatchKey::HPU);

// --- which card this process has ------------------------------------------------------------

// As the driver does it: a card serves one process, from its first use until it ends. HLS_MODULE_ID
// names one; else any free one is given, of those that HABANA_VISIBLE_MODULES lists. A card is a file
// that is locked; its name, open in the process, shows who has it. LANTERN_HPU_SOFTWARE_MODULES says how
// many there are (8).
std::mutex acquiring;
int64_t held = -1;

std::vector<int64_t> numbers(const char* name) {
  std::vector<int64_t> found;
  const char* text = std::getenv(name);
  std::string word;
  for (const char* at = text; at != nullptr; ++at) {
    if (*at >= '0' && *at <= '9') {
      word += *at;
      continue;
    }
    if (!word.empty()) found.push_back(std::stol(word));
    word.clear();
    if (*at == 0) break;
  }
  return found;
}

bool lock(int64_t module) {
  const char* chosen = std::getenv("LANTERN_HPU_SOFTWARE_LOCKS");
  std::string path =
      chosen ? chosen : "/tmp/lantern_accel_software_hpu_" + std::to_string(getuid());
  for (const char* below : {"", "/dev", "/accel"}) mkdir((path += below).c_str(), 0700);
  path += "/accel" + std::to_string(module);
  const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  TORCH_CHECK(file >= 0, "software HPU: cannot open ", path, "; set LANTERN_HPU_SOFTWARE_LOCKS");
  if (flock(file, LOCK_EX | LOCK_NB) == 0) return true;  // closed when the process ends
  close(file);
  return false;
}

int64_t acquire() {
  const std::lock_guard<std::mutex> one(acquiring);
  if (held >= 0) return held;
  const auto given = numbers("LANTERN_HPU_SOFTWARE_MODULES");
  const int64_t count = given.empty() ? 8 : given[0];
  const auto listed = numbers("HABANA_VISIBLE_MODULES");
  const auto named = numbers("HLS_MODULE_ID");
  if (!named.empty()) {
    if (named[0] < count && lock(named[0])) return held = named[0];
    TORCH_CHECK(listed.empty(), "synStatus=20 [Device already acquired] Device acquire failed.");
  }
  TORCH_CHECK(count > 0, "synStatus=8 [Device not found] Device acquire failed. No devices found.");
  for (int64_t module = 0; module < count; ++module) {
    const bool may =
        listed.empty() || std::find(listed.begin(), listed.end(), module) != listed.end();
    if (may && lock(module)) return held = module;
  }
  TORCH_CHECK(false, "synStatus=26 [Generic failure] Device acquire failed.");
}

// --- memory ---------------------------------------------------------------------------------

std::atomic<int64_t> in_use{0}, peak{0}, limit{INT64_MAX};
// The size of an allocation stands in front of it, a cache line before the data.
constexpr size_t HEAD = 64;

void release(void* data) {
  if (data == nullptr) return;
  void* start = static_cast<char*>(data) - HEAD;
  in_use -= *static_cast<int64_t*>(start);
  std::free(start);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (held < 0) acquire();
    if (size == 0) return {nullptr, nullptr, &release, DEVICE};
    const auto bytes = static_cast<int64_t>(size);
    TORCH_CHECK_WITH(
        OutOfMemoryError, in_use + bytes <= limit, "software HPU: out of memory: asked for ", bytes,
        " bytes, ", limit - in_use, " of ", limit.load(), " are free");
    void* start = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, posix_memalign(&start, HEAD, size + HEAD) == 0,
        "software HPU: the host has no memory for ", bytes, " bytes");
    *static_cast<int64_t*>(start) = bytes;
    in_use += bytes;
    if (in_use > peak) peak = in_use.load();
    void* data = static_cast<char*>(start) + HEAD;
    return {data, data, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

Memory memory;

// --- one device, one stream -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return HPU; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "software HPU: there is one device, hpu:0, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

}  // namespace
