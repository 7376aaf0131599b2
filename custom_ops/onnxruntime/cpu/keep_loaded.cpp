#include "keep_loaded.h"

#if defined(_WIN32)
#include <windows.h>
#endif

void nnorm::ort::keep_loaded() noexcept {
#if defined(_WIN32)
  HMODULE library = nullptr;
  GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                     reinterpret_cast<LPCSTR>(&nnorm::ort::keep_loaded), &library);
#endif
}
