#include "memory.h"

#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "simd.h"

namespace antiphon {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kSlab = 32 * kHugePage;  // what no piece has touched takes no memory

}  // namespace

void* allocate(int64_t bytes) {
  const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const int64_t rounded = round_up<int64_t>(bytes > 0 ? bytes : 1, alignment);
  void* memory = aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  return memory;
}

std::shared_ptr<char> take_piece(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<char> current;
  static int64_t used;
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t size = round_up<int64_t>(bytes, 64);
  std::shared_ptr<char> slab = current.lock();
  if (slab == nullptr || used + size > kSlab) {
    const int64_t slab_size = size > kSlab ? size : kSlab;
    slab.reset(static_cast<char*>(allocate(slab_size)), free);
    if (size >= kSlab) return slab;  // it has a slab of its own
    current = slab;
    used = 0;
  }
  char* start = slab.get() + used;
  used += size;
  return {slab, start};
}

}  // namespace antiphon
