// Memory for weights and buffers. Huge pages, because a step reads all weights once: with small ones a third of its
// time goes into looking up addresses.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace antiphon {

// 64-byte aligned; large pieces ask for huge pages, and take them as they are written. Free with `free`. Throws
// std::bad_alloc.
void* allocate(int64_t bytes);

struct Free {
  void operator()(void* memory) const { free(memory); }
};

// An array of its own.
template <typename T>
using Memory = std::unique_ptr<T[], Free>;

// `count` numbers, of which nothing is known before they are written.
template <typename T>
Memory<T> take(int64_t count) {
  return Memory<T>(static_cast<T*>(allocate(count * static_cast<int64_t>(sizeof(T)))));
}

// `count` zeros.
template <typename T>
Memory<T> take_zeros(int64_t count) {
  Memory<T> memory = take<T>(count);
  memset(memory.get(), 0, count * sizeof(T));
  return memory;
}

// A piece of a slab that pieces taken one after the other share, so that small ones lie in huge pages, too. A slab
// lives as long as any of its pieces.
std::shared_ptr<char> take_piece(int64_t bytes);

}  // namespace antiphon
