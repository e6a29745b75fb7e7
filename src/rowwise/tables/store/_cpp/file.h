// Reads of files by their descriptor.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace rowwise {

inline int read_fully(int file, char* to, int64_t bytes, int64_t at) {  // 0 or errno
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(file, to + done, std::size_t(bytes - done), at + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got ? errno : EIO;
    done += got;
  }
  return 0;
}

}  // namespace rowwise
