// Streams and events of the software HPU: a thread for each stream, and copies that land late.
//
// What a stream was given runs in its thread, in order, and only once somebody waits for it: as late as a
// device may, so that whoever reads or overwrites too early sees it every time. A copy to memory that is
// not pinned goes to a buffer first, and from there to its destination by the way of the bridge: no event
// waits for that second half. Here it happens at the next wait, one late.
#pragma once

#include "card.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/HPUHooksInterface.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <thread>

namespace {

class Stream {
 public:
  // Add work; returns its number, which counts from 1.
  int64_t give(std::function<void()> work) {
    const std::lock_guard<std::mutex> one(mutex_);
    if (!started_) {
      std::thread([this] { run(); }).detach();
      started_ = true;
    }
    work_.push_back(std::move(work));
    return ++given_;
  }

  int64_t given() {
    const std::lock_guard<std::mutex> one(mutex_);
    return given_;
  }

  // Let everything up to a number run, and wait until it has.
  void wait(int64_t number) {
    std::deque<std::function<void()>> over;
    {
      std::unique_lock<std::mutex> one(mutex_);
      wanted_ = std::max(wanted_, number);
      changed_.notify_all();
      changed_.wait(one, [&] { return done_ >= number; });
      over.swap(over_);
    }
    // What the work held goes here: a tensor of Python's must not be let go of in the other thread.
  }

 private:
  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::unique_lock<std::mutex> one(mutex_);
    for (;;) {
      changed_.wait(one, [&] { return done_ < wanted_ && !work_.empty(); });
      auto work = std::move(work_.front());
      work_.pop_front();
      one.unlock();
      work();
      one.lock();
      over_.push_back(std::move(work));
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_, over_;
  int64_t given_ = 0, done_ = 0, wanted_ = 0;
  bool started_ = false;
};

// Never freed: their threads end with the process.
std::mutex listing;
auto& streams = *new std::map<int64_t, Stream*>{{0, new Stream}};
thread_local int64_t current = 0;

Stream& stream_of(int64_t id) {
  const std::lock_guard<std::mutex> one(listing);
  const auto found = streams.find(id);
  TORCH_CHECK(found != streams.end(), "software HPU: there is no stream ", id);
  return *found->second;
}

int64_t new_stream() {
  const std::lock_guard<std::mutex> one(listing);
  const auto id = static_cast<int64_t>(streams.size());
  streams[id] = new Stream;
  return id;
}

// --- errors that come late ---------------------------------------------------------------------

// As the bridge's threads have them: work that failed is lost, and its error comes once, at the start of a
// wait; where its thread has ended, also when more work is given.
struct Late {
  std::string text;
  bool at_launch;
};
std::mutex failing;
auto& late = *new std::deque<Late>;

void raise_late(bool launching) {
  std::string text;
  {
    const std::lock_guard<std::mutex> one(failing);
    if (late.empty() || (launching && !late.front().at_launch)) return;
    text = late.front().text;
    late.pop_front();
  }
  TORCH_CHECK(false, text);
}

// What the operators of this thread come after.
void catch_up() {
  raise_late(true);
  auto& mine = stream_of(current);
  mine.wait(mine.given());
}

// --- copies to the host -----------------------------------------------------------------------

struct Landing {
  at::Tensor buffer, to;
};
std::mutex landing;
auto& arrived = *new std::vector<Landing>;

// Finish copies whose first half had ended before this wait began; then wait.
template <typename Wait>
void wait_and_land(Wait wait, bool all = false) {
  raise_late(false);
  std::vector<Landing> now;
  {
    const std::lock_guard<std::mutex> one(landing);
    now.swap(arrived);
  }
  wait();
  if (all) {
    const std::lock_guard<std::mutex> one(landing);
    now.insert(now.end(), arrived.begin(), arrived.end());
    arrived.clear();
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  for (auto& one : now) one.to.copy_(one.buffer);
}

bool is_pinned(const void* data);

// Copy `from`, device memory as the host sees it, to `to` behind what the current stream was given.
void copy_to_host_later(const at::Tensor& from, const at::Tensor& owner, const at::Tensor& to) {
  if (is_pinned(to.data_ptr())) {
    stream_of(current).give([from, owner, to] { to.copy_(from); });
    return;
  }
  const auto buffer = at::empty_like(to);
  stream_of(current).give([from, owner, to, buffer] {
    buffer.copy_(from);
    const std::lock_guard<std::mutex> one(landing);
    arrived.push_back({buffer, to});
  });
}

void wait_for_all() {
  std::vector<Stream*> all;
  {
    const std::lock_guard<std::mutex> one(listing);
    for (const auto& [id, one_stream] : streams) all.push_back(one_stream);
  }
  wait_and_land([&] { for (auto* one : all) one->wait(one->given()); }, true);
}

// --- memory that is pinned --------------------------------------------------------------------

std::mutex pinning;
auto& pinned = *new std::map<const char*, size_t>;

bool is_pinned(const void* data) {
  const std::lock_guard<std::mutex> one(pinning);
  const auto* at = static_cast<const char*>(data);
  auto found = pinned.upper_bound(at);
  if (found == pinned.begin()) return false;
  --found;
  return at < found->first + found->second;
}

void unpin(void* data) {
  if (data == nullptr) return;
  const std::lock_guard<std::mutex> one(pinning);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &unpin, c10::Device(c10::kCPU)};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "software HPU: no memory to pin");
    const std::lock_guard<std::mutex> one(pinning);
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

PinnedMemory pinned_memory;

// LANTERN_HPU_SOFTWARE_PINNED=0: a bridge that pins nothing.
bool pins() {
  const char* asked = std::getenv("LANTERN_HPU_SOFTWARE_PINNED");
  return asked == nullptr || std::string(asked) != "0";
}

// Torch asks these who the accelerator is, and for memory that it can reach.
struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return pins() && !at::hasCUDA(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(pins(), "software HPU: this bridge pins no memory");
    return &pinned_memory;
  }
};

}  // namespace

namespace at {
REGISTER_HPU_HOOKS(HPUHooks);
}  // namespace at
